// The kernels, compiled once per instruction set: a kernels_<set>.cpp defines PCCL_KERNEL_TABLE and
// includes this file.
//
// Everything here has internal linkage and calls no inline function of a standard header: the
// linker keeps only one copy of such a function, and a copy compiled for AVX-512 must not be the
// one that an older processor runs.
//
// Elements are taken in blocks that stay in the L1 cache while all contributions are combined.
// Whatever is narrower than the accumulation type is widened into a block first. Loops are plain
// and left to the compiler to vectorise, except float16, for which it does not use the conversion
// instructions.

#include <stddef.h>
#include <stdint.h>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "pccl/reduce/kernels.h"

// `out` may be exactly `own` or a contribution, so iterations are independent even where the memory
// is the same.
#if defined(__clang__)
#define PCCL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PCCL_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace pccl::reduce {
namespace {

struct Float16 {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <class T>
constexpr bool kFloating = false;
template <>
constexpr bool kFloating<float> = true;
template <>
constexpr bool kFloating<double> = true;

// Where integers are added and multiplied: unsigned, so that they wrap, and wide enough not to be
// promoted to int.
template <class T, bool kWide = (sizeof(T) > 4)>
struct Wrapping {
  using type = uint32_t;
};
template <class T>
struct Wrapping<T, true> {
  using type = uint64_t;
};

template <class T>
T load(const char* from, size_t i) {
  T value;
  __builtin_memcpy(&value, from + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store(char* to, size_t i, T value) {
  __builtin_memcpy(to + i * sizeof(T), &value, sizeof(T));
}

// --- operators
// ---------------------------------------------------------------------------------------------------

struct Add {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (kFloating<T>) {
      return a + b;
    } else {
      using W = typename Wrapping<T>::type;
      return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
    }
  }
};

struct Multiply {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (kFloating<T>) {
      return a * b;
    } else {
      using W = typename Wrapping<T>::type;
      return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
    }
  }
};

// A NaN on the right fails the comparison and is taken; one on the left needs asking.
struct Maximum {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (kFloating<T>) {
      const T larger = a > b ? a : b;
      return a != a ? a : larger;
    } else {
      return a > b ? a : b;
    }
  }
};

struct Minimum {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (kFloating<T>) {
      const T smaller = a < b ? a : b;
      return a != a ? a : smaller;
    } else {
      return a < b ? a : b;
    }
  }
};

// --- what is done to a value on its way out
// ------------------------------------------------------------------------

// Which of two NaNs an addition keeps depends on the order the compiler gave its operands, so
// results carry one NaN.
template <class Acc>
Acc canonical(Acc value) {
  if constexpr (kSame<Acc, float>) {
    return value != value ? __builtin_nanf("") : value;
  } else if constexpr (kSame<Acc, double>) {
    return value != value ? __builtin_nan("") : value;
  } else {
    return value;
  }
}

template <class Acc>
struct Keep {
  Acc operator()(Acc value) const { return canonical(value); }
};

template <class Acc>
struct Divide {
  Acc divisor;
  Acc operator()(Acc value) const { return canonical(static_cast<Acc>(value / divisor)); }
};

// --- conversions between an element type and its accumulation type
// -------------------------------------------------

template <class To, class From>
To bit_copy(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// Branch-free, so that the compiler can vectorise it.
float to_float(Float16 half) {
  const uint32_t magnitude = half.bits & 0x7fffU;
  const uint32_t sign = (half.bits & 0x8000U) << 16;
  const uint32_t rebias = 112U << 23;  // the exponents' biases are 127 and 15
  const uint32_t normal = (magnitude << 13) + rebias;
  const uint32_t special = normal + rebias;  // infinity, NaN
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24F;
  const uint32_t finite = magnitude < 0x400U ? bit_copy<uint32_t>(small) : normal;
  return bit_copy<float>((magnitude >= 0x7c00U ? special : finite) | sign);
}

float to_float(Bfloat16 value) { return bit_copy<float>(static_cast<uint32_t>(value.bits) << 16); }

float to_float(float value) { return value; }

// Nearest, ties to even. REQUIRES for both 16-bit types: a NaN is the canonical one.
void from_float(float value, Float16* to) {
  const uint32_t bits = bit_copy<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffU;
  const uint32_t sign = (bits >> 16) & 0x8000U;
  // Below the smallest normal half, adding one half in float leaves the rounded multiple of 2^-24
  // in the low bits.
  const uint32_t small = bit_copy<uint32_t>(bit_copy<float>(magnitude) + 0.5F) - (126U << 23);
  const uint32_t odd = (magnitude >> 13) & 1U;
  const uint32_t normal = (magnitude - (112U << 23) + 0xfffU + odd) >> 13;
  const uint32_t finite = magnitude < (113U << 23) ? small : normal;
  const uint32_t special = magnitude > 0x7f800000U ? 0x7e00U : 0x7c00U;
  to->bits = static_cast<uint16_t>((magnitude >= (143U << 23) ? special : finite) | sign);
}

void from_float(float value, Bfloat16* to) {
  const uint32_t bits = bit_copy<uint32_t>(value);
  to->bits = static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

void from_float(float value, float* to) { *to = value; }

template <class T, class Acc>
void widen(const char* from, Acc* to, size_t count) {
  size_t i = 0;
#if defined(__AVX512F__)
  if constexpr (kSame<T, Float16>) {
    for (; i + 16 <= count; i += 16) {
      __m256i halves;
      __builtin_memcpy(&halves, from + 2 * i, sizeof(halves));
      const __m512 floats = _mm512_maskz_cvtph_ps(0xffff, halves);
      __builtin_memcpy(to + i, &floats, sizeof(floats));
    }
  }
#elif defined(__F16C__)
  if constexpr (kSame<T, Float16>) {
    for (; i + 8 <= count; i += 8) {
      __m128i halves;
      __builtin_memcpy(&halves, from + 2 * i, sizeof(halves));
      const __m256 floats = _mm256_cvtph_ps(halves);
      __builtin_memcpy(to + i, &floats, sizeof(floats));
    }
  }
#endif
  PCCL_INDEPENDENT
  for (size_t j = i; j < count; ++j) {
    if constexpr (kSame<T, Float16> || kSame<T, Bfloat16>) {
      to[j] = to_float(load<T>(from, j));
    } else {
      to[j] = static_cast<Acc>(load<T>(from, j));
    }
  }
}

// REQUIRES: T is narrower than Acc.
template <class T, class Acc, class Finish>
void narrow(const Acc* from, char* to, size_t count, Finish finish) {
  PCCL_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    if constexpr (kSame<T, Float16> || kSame<T, Bfloat16>) {
      T value;
      from_float(finish(from[i]), &value);
      store<T>(to, i, value);
    } else {
      store<T>(to, i, static_cast<T>(finish(from[i])));
    }
  }
}

#if defined(__AVX512F__) || defined(__F16C__)
// NaNs are canonical when they get here, and the instruction truncates them to 0x7e00 like the loop
// above.
void narrow_halves(const float* from, char* to, size_t count) {
  size_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    __m512 floats;
    __builtin_memcpy(&floats, from + i, sizeof(floats));
    const __m256i halves =
        _mm512_maskz_cvtps_ph(0xffff, floats, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __builtin_memcpy(to + 2 * i, &halves, sizeof(halves));
  }
#else
  for (; i + 8 <= count; i += 8) {
    __m256 floats;
    __builtin_memcpy(&floats, from + i, sizeof(floats));
    const __m128i halves = _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(to + 2 * i, &halves, sizeof(halves));
  }
#endif
  for (; i < count; ++i) {
    Float16 value;
    from_float(from[i], &value);
    store<Float16>(to, i, value);
  }
}
#endif

// --- loops
// -----------------------------------------------------------------------------------------------------------

// Values that leave the block go through `finish`; those that stay do not.
template <class Op, class Acc>
void combine(const char* left, const char* right, Acc* block, size_t count) {
  PCCL_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    block[i] = Op::apply(load<Acc>(left, i), load<Acc>(right, i));
  }
}

template <class Op, class Acc, class Finish>
void combine_last(const char* left, const char* right, char* out, size_t count, Finish finish) {
  PCCL_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    store<Acc>(out, i, finish(Op::apply(load<Acc>(left, i), load<Acc>(right, i))));
  }
}

template <class Acc, class Finish>
void finish_only(const char* from, char* out, size_t count, Finish finish) {
  PCCL_INDEPENDENT
  for (size_t i = 0; i < count; ++i) store<Acc>(out, i, finish(load<Acc>(from, i)));
}

// One contribution to bfloat16 in one pass: the conversions are cheap enough to sit in the loop.
template <class Op, class Right, class Out, class Finish>
void combine_converting(const char* own, const char* right, char* out, size_t count,
                        Finish finish) {
  PCCL_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    const float a = to_float(load<Bfloat16>(own, i));
    const float b = to_float(load<Right>(right, i));
    Out value;
    from_float(finish(Op::apply(a, b)), &value);
    store<Out>(out, i, value);
  }
}

template <class Op, class Finish>
void combine_bfloat16(const char* own, const Contribution& contribution, bool final, char* out,
                      size_t count, Finish finish) {
  const char* right = static_cast<const char*>(contribution.data);
  if (contribution.accumulated && final) {
    combine_converting<Op, float, Bfloat16>(own, right, out, count, finish);
  } else if (contribution.accumulated) {
    combine_converting<Op, float, float>(own, right, out, count, finish);
  } else if (final) {
    combine_converting<Op, Bfloat16, Bfloat16>(own, right, out, count, finish);
  } else {
    combine_converting<Op, Bfloat16, float>(own, right, out, count, finish);
  }
}

template <class T, class Acc, class Op, class Finish>
void run(const char* own, const Contribution* contributions, size_t contribution_count, bool final,
         char* out, size_t count, Finish finish) {
  if constexpr (kSame<T, Bfloat16>) {
    if (contribution_count == 1) {
      return combine_bfloat16<Op>(own, contributions[0], final, out, count, finish);
    }
  }
  constexpr bool kWidens = !kSame<T, Acc>;
  constexpr size_t kBlock = 4096 / sizeof(Acc);
  alignas(64) Acc block[kBlock];
  alignas(64) Acc widened[kBlock];
  const bool narrows = kWidens && final;
  // With a single pass there is nothing to keep in the cache.
  const size_t step = !kWidens && contribution_count <= 1 ? count : kBlock;
  for (size_t first = 0; first < count; first += step) {
    const size_t n = count - first < step ? count - first : step;
    char* to = out + first * (narrows ? sizeof(T) : sizeof(Acc));
    const char* left = own + first * sizeof(T);
    if constexpr (kWidens) {
      widen<T>(left, block, n);
      left = reinterpret_cast<const char*>(block);
    }
    for (size_t c = 0; c < contribution_count; ++c) {
      const char* right = static_cast<const char*>(contributions[c].data);
      if constexpr (kWidens) {
        if (contributions[c].accumulated) {
          right += first * sizeof(Acc);
        } else {
          widen<T>(right + first * sizeof(T), widened, n);
          right = reinterpret_cast<const char*>(widened);
        }
      } else {
        right += first * sizeof(Acc);
      }
      if (c + 1 == contribution_count && !narrows) {
        combine_last<Op, Acc>(left, right, to, n, finish);
      } else {
        combine<Op, Acc>(left, right, block, n);
        left = reinterpret_cast<const char*>(block);
      }
    }
    if (narrows) {
#if defined(__AVX512F__) || defined(__F16C__)
      if constexpr (kSame<T, Float16>) {
        finish_only<Acc>(left, reinterpret_cast<char*>(block), n, finish);
        narrow_halves(block, to, n);
        continue;
      }
#endif
      if constexpr (kWidens) narrow<T>(block, to, n, finish);
    } else if (contribution_count == 0) {
      finish_only<Acc>(left, to, n, finish);
    }
  }
}

template <class T, class Acc, class Op, bool kAverage>
void kernel(const void* own, const Contribution* contributions, size_t contribution_count,
            unsigned divisor, void* out, size_t count) {
  const char* from = static_cast<const char*>(own);
  char* to = static_cast<char*>(out);
  const bool final = divisor > 0;
  if constexpr (kAverage) {
    if (final) {
      return run<T, Acc, Op>(from, contributions, contribution_count, final, to, count,
                             Divide<Acc>{static_cast<Acc>(divisor)});
    }
  }
  if (contribution_count == 0 && (final || kSame<T, Acc>)) {
    __builtin_memmove(to, from, count * sizeof(T));
    return;
  }
  run<T, Acc, Op>(from, contributions, contribution_count, final, to, count, Keep<Acc>{});
}

}  // namespace

// Columns as in ReduceOp: sum, avg, prod, max, min.
#define PCCL_KERNEL_ROW(T, Acc, AverageAcc)                                \
  {                                                                        \
    &kernel<T, Acc, Add, false>, &kernel<T, AverageAcc, Add, true>,        \
        &kernel<T, Acc, Multiply, false>, &kernel<T, Acc, Maximum, false>, \
        &kernel<T, Acc, Minimum, false>                                    \
  }

// Rows as in DataType.
const KernelTable PCCL_KERNEL_TABLE = {{
    PCCL_KERNEL_ROW(uint8_t, uint8_t, uint64_t),
    PCCL_KERNEL_ROW(int8_t, int8_t, int64_t),
    PCCL_KERNEL_ROW(int16_t, int16_t, int64_t),
    PCCL_KERNEL_ROW(uint16_t, uint16_t, uint64_t),
    PCCL_KERNEL_ROW(uint32_t, uint32_t, uint64_t),
    PCCL_KERNEL_ROW(int32_t, int32_t, int64_t),
    PCCL_KERNEL_ROW(uint64_t, uint64_t, uint64_t),
    PCCL_KERNEL_ROW(int64_t, int64_t, int64_t),
    PCCL_KERNEL_ROW(Float16, float, float),
    PCCL_KERNEL_ROW(Bfloat16, float, float),
    PCCL_KERNEL_ROW(float, float, float),
    PCCL_KERNEL_ROW(double, double, double),
}};

#undef PCCL_KERNEL_ROW
#undef PCCL_INDEPENDENT

}  // namespace pccl::reduce
