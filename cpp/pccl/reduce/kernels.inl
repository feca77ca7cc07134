// The kernels, compiled once per instruction set: a kernels_<set>.cpp defines PCCL_KERNEL_TABLE and
// includes this file.
//
// Everything here has internal linkage and calls no inline function of a standard header: the
// linker keeps only one copy of such a function, and an older processor must not run a copy
// compiled for AVX-512.
//
// Elements are processed in blocks that stay in the L1 cache while all contributions are combined.
// Elements narrower than the accumulation type are widened into a block first; 16-bit floats are
// widened in registers where instructions for it exist. The compiler vectorises the other loops.

#include <stddef.h>
#include <stdint.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "pccl/reduce/kernels.h"

// Iterations are independent: `out` equals `own` or a contribution, or overlaps neither.
#if defined(__clang__)
#define PCCL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PCCL_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace pccl::reduce {
namespace {

// A float of 16 bits or less. Without infinities, all bits set are NaN, and the other codes with
// the highest exponent are numbers.
template <class Bits, unsigned kExponent, unsigned kMantissa, bool kInfinities>
struct SmallFloat {
  Bits bits;
};
using Float16 = SmallFloat<uint16_t, 5, 10, true>;
using Float8E5m2 = SmallFloat<uint8_t, 5, 2, true>;
using Float8E4m3fn = SmallFloat<uint8_t, 4, 3, false>;
struct Bfloat16 {
  uint16_t bits;
};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <class T>
constexpr bool kSmall = false;
template <class Bits, unsigned kExponent, unsigned kMantissa, bool kInfinities>
constexpr bool kSmall<SmallFloat<Bits, kExponent, kMantissa, kInfinities>> = true;

template <class T>
constexpr bool kFloating = false;
template <>
constexpr bool kFloating<float> = true;
template <>
constexpr bool kFloating<double> = true;

// For sums of 64-bit integers under avg.
__extension__ typedef __int128 Int128;
__extension__ typedef unsigned __int128 Uint128;

// The type for integer arithmetic: unsigned, so that it wraps, and too wide to be promoted to int.
template <class T, size_t kSize = sizeof(T)>
struct Wrapping {
  using type = uint32_t;
};
template <class T>
struct Wrapping<T, 8> {
  using type = uint64_t;
};
template <class T>
struct Wrapping<T, 16> {
  using type = Uint128;
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

// -- operators

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

// The comparison selects a NaN on the right; one on the left is checked for.
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

// -- finishing results

// Which of two NaNs an addition returns depends on the order in which the compiler puts the
// operands, so all results have the same NaN.
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
  template <class Value>
  Value operator()(Value value) const {
    return canonical(value);
  }
};

// `Value`: Acc or a vector of Acc.
template <class Acc>
struct Divide {
  Acc divisor;
  template <class Value>
  Value operator()(Value value) const {
    return canonical(static_cast<Value>(value / divisor));
  }
};

// Most sums fit in 64 bits, for which the division is much faster.
template <class Wide, class Narrow>
struct DivideWide {
  Wide divisor;
  Wide operator()(Wide value) const {
    const auto narrow = static_cast<Narrow>(value);
    return narrow == value ? static_cast<Wide>(narrow / static_cast<Narrow>(divisor))
                           : value / divisor;
  }
};
template <>
struct Divide<Int128> : DivideWide<Int128, int64_t> {};
template <>
struct Divide<Uint128> : DivideWide<Uint128, uint64_t> {};

// -- conversions between an element type and its accumulation type

template <class To, class From>
To bit_copy(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// The format of a small float, in units of its bits and of float's.
template <unsigned kExponent, unsigned kMantissa, bool kInfinities>
struct Format {
  static constexpr uint32_t kSignBit = 1U << (kExponent + kMantissa);
  static constexpr unsigned kShift = 23 - kMantissa;                   // of mantissas
  static constexpr unsigned kSignShift = 31 - kExponent - kMantissa;   // of signs
  static constexpr uint32_t kRebias = 128U - (1U << (kExponent - 1));  // of exponents
  static constexpr uint32_t kLeastNormal = 1U << kMantissa;            // and larger
  static constexpr uint32_t kLeastNormalFloat = (kRebias + 1) << 23;
  // The least code that is no number, and as a float what it would be if it were one.
  static constexpr uint32_t kSpecial = kInfinities ? kSignBit - (1U << kMantissa) : kSignBit - 1;
  static constexpr uint32_t kTooLarge = (kSpecial << kShift) + (kRebias << 23);
  static constexpr uint32_t kNan = kInfinities ? kSpecial | (1U << (kMantissa - 1)) : kSpecial;
  // The least number above zero, and that times 2^23.
  static constexpr float kUnit = __builtin_bit_cast(float, (kRebias + 1 - kMantissa) << 23);
  static constexpr float kUnits = __builtin_bit_cast(float, (kRebias + 24 - kMantissa) << 23);
};

// Branch-free, so that loops can be vectorised.
template <class Bits, unsigned kExponent, unsigned kMantissa, bool kInfinities>
float to_float(SmallFloat<Bits, kExponent, kMantissa, kInfinities> value) {
  using F = Format<kExponent, kMantissa, kInfinities>;
  const uint32_t magnitude = value.bits & (F::kSignBit - 1);
  const uint32_t sign = (value.bits & F::kSignBit) << F::kSignShift;
  const uint32_t normal = (magnitude << F::kShift) + (F::kRebias << 23);
  const uint32_t special = kInfinities ? normal + (F::kRebias << 23) : 0x7fc00000U;
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * F::kUnit;
  const uint32_t finite = magnitude < F::kLeastNormal ? bit_copy<uint32_t>(small) : normal;
  return bit_copy<float>((magnitude >= F::kSpecial ? special : finite) | sign);
}

float to_float(Bfloat16 value) { return bit_copy<float>(static_cast<uint32_t>(value.bits) << 16); }

// Nearest, ties to even; a number that is too large becomes infinity, or NaN where there is none.
// REQUIRES for all small types: a NaN is the canonical one.
template <class Bits, unsigned kExponent, unsigned kMantissa, bool kInfinities>
void from_float(float value, SmallFloat<Bits, kExponent, kMantissa, kInfinities>* to) {
  using F = Format<kExponent, kMantissa, kInfinities>;
  const uint32_t bits = bit_copy<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffU;
  // Below the smallest normal number, adding 2^23 units in float leaves the rounded number of units
  // in the low bits.
  const uint32_t small =
      bit_copy<uint32_t>(bit_copy<float>(magnitude) + F::kUnits) - bit_copy<uint32_t>(F::kUnits);
  const uint32_t odd = (magnitude >> F::kShift) & 1U;
  const uint32_t half = (1U << (F::kShift - 1)) - 1;
  const uint32_t normal = (magnitude - (F::kRebias << 23) + half + odd) >> F::kShift;
  const uint32_t finite = magnitude < F::kLeastNormalFloat ? small : normal;
  const uint32_t special = magnitude > 0x7f800000U ? F::kNan : F::kSpecial;
  const uint32_t code = magnitude >= F::kTooLarge ? special : finite;
  const uint32_t sign = (bits >> F::kSignShift) & F::kSignBit;
  // Every NaN is the canonical one, those of numbers that are too large, too.
  to->bits = static_cast<Bits>(code | (kInfinities || code < F::kNan ? sign : 0U));
}

void from_float(float value, Bfloat16* to) {
  const uint32_t bits = bit_copy<uint32_t>(value);
  to->bits = static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

void from_float(float value, float* to) { *to = value; }

template <class T, class Acc>
void widen(const char* from, Acc* to, size_t count) {
  PCCL_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    if constexpr (kSmall<T>) {
      to[i] = to_float(load<T>(from, i));
    } else {
      to[i] = static_cast<Acc>(load<T>(from, i));
    }
  }
}

// REQUIRES: T is narrower than Acc.
template <class T, class Acc, class Finish>
void narrow(const Acc* from, char* to, size_t count, Finish finish) {
  PCCL_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    if constexpr (kSmall<T>) {
      T value;
      from_float(finish(from[i]), &value);
      store<T>(to, i, value);
    } else {
      store<T>(to, i, static_cast<T>(finish(from[i])));
    }
  }
}

// -- loops

// Combines into a block, without `finish`.
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

// -- 16-bit floats, widened in registers

#if defined(__AVX512F__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif
constexpr size_t kLanes = kVectorBytes / sizeof(float);
constexpr size_t kVectors = 4;  // in parallel, to hide the latency of additions

using Floats = float __attribute__((vector_size(kVectorBytes)));
using Words = uint32_t __attribute__((vector_size(kVectorBytes)));
using Halves = uint16_t __attribute__((vector_size(kVectorBytes / 2)));

template <>
constexpr bool kFloating<Floats> = true;

template <>
Floats canonical(Floats value) {
  return value == value ? value : Floats{} + __builtin_nanf("");
}

// Whether elements of this type are widened in registers.
template <class T>
constexpr bool kInRegisters = kSame<T, Bfloat16>;
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__)) || defined(__aarch64__)
template <>
constexpr bool kInRegisters<Float16> = true;
#endif

template <class Vector>
Vector load_vector(const char* from) {
  Vector vector;
  __builtin_memcpy(&vector, from, sizeof(vector));
  return vector;
}

// Intrinsics, because compilers use three to five instructions where one suffices.
Words to_words(Halves halves) {
#if defined(__AVX512F__)
  return bit_copy<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, bit_copy<__m256i>(halves)));
#elif defined(__AVX2__)
  return bit_copy<Words>(_mm256_cvtepu16_epi32(bit_copy<__m128i>(halves)));
#else
  return __builtin_convertvector(halves, Words);
#endif
}

// REQUIRES: the values fit.
Halves to_halves(Words words) {
#if defined(__AVX512F__)
  return bit_copy<Halves>(_mm512_maskz_cvtepi32_epi16(0xffff, bit_copy<__m512i>(words)));
#elif defined(__AVX2__)
  const __m256i all = bit_copy<__m256i>(words);
  return bit_copy<Halves>(
      _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
#else
  return __builtin_convertvector(words, Halves);
#endif
}

template <class T>
Floats load_floats(const char* from, size_t i) {
  if constexpr (kSame<T, float>) {
    return load_vector<Floats>(from + 4 * i);
  } else if constexpr (kSame<T, Bfloat16>) {
    return bit_copy<Floats>(to_words(load_vector<Halves>(from + 2 * i)) << 16);
  } else {
#if defined(__AVX512F__)
    return bit_copy<Floats>(_mm512_maskz_cvtph_ps(0xffff, load_vector<__m256i>(from + 2 * i)));
#elif defined(__AVX2__) && defined(__F16C__)
    return bit_copy<Floats>(_mm256_cvtph_ps(load_vector<__m128i>(from + 2 * i)));
#elif defined(__aarch64__)
    return bit_copy<Floats>(vcvt_f32_f16(load_vector<float16x4_t>(from + 2 * i)));
#endif
  }
}

// REQUIRES for all small types: a NaN is the canonical one.
template <class T>
void store_floats(char* to, size_t i, Floats value) {
  if constexpr (kSame<T, float>) {
    __builtin_memcpy(to + 4 * i, &value, sizeof(value));
  } else if constexpr (kSame<T, Bfloat16>) {
    const Words bits = bit_copy<Words>(value);
    const Halves halves = to_halves((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
    __builtin_memcpy(to + 2 * i, &halves, sizeof(halves));
  } else {
    // The instruction truncates the canonical NaN to 0x7e00, as from_float does.
#if defined(__AVX512F__)
    const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, bit_copy<__m512>(value),
                                                 _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __builtin_memcpy(to + 2 * i, &halves, sizeof(halves));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i halves = _mm256_cvtps_ph(bit_copy<__m256>(value), _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(to + 2 * i, &halves, sizeof(halves));
#elif defined(__aarch64__)
    const float16x4_t halves = vcvt_f16_f32(bit_copy<float32x4_t>(value));
    __builtin_memcpy(to + 2 * i, &halves, sizeof(halves));
#endif
  }
}

// Combines all contributions to a few vectors of elements before it goes on to the next ones, so
// that no widened value is stored. Advances `i`.
template <class T, class Out, class Op, size_t kCount, class Finish>
void combine_vectors(const char* own, const Contribution* contributions, size_t contribution_count,
                     char* out, size_t count, Finish finish, size_t* i) {
  for (; *i + kCount * kLanes <= count; *i += kCount * kLanes) {
    Floats sums[kCount];
    for (size_t v = 0; v < kCount; ++v) sums[v] = load_floats<T>(own, *i + v * kLanes);
    for (size_t c = 0; c < contribution_count; ++c) {
      const char* right = static_cast<const char*>(contributions[c].data);
      if (contributions[c].accumulated) {
        for (size_t v = 0; v < kCount; ++v)
          sums[v] = Op::apply(sums[v], load_floats<float>(right, *i + v * kLanes));
      } else {
        for (size_t v = 0; v < kCount; ++v)
          sums[v] = Op::apply(sums[v], load_floats<T>(right, *i + v * kLanes));
      }
    }
    for (size_t v = 0; v < kCount; ++v) store_floats<Out>(out, *i + v * kLanes, finish(sums[v]));
  }
}

template <class T, class Out, class Op, class Finish>
void combine_in_registers(const char* own, const Contribution* contributions,
                          size_t contribution_count, char* out, size_t count, Finish finish) {
  size_t i = 0;
  combine_vectors<T, Out, Op, kVectors>(own, contributions, contribution_count, out, count, finish,
                                        &i);
  combine_vectors<T, Out, Op, 1>(own, contributions, contribution_count, out, count, finish, &i);
  for (; i < count; ++i) {
    float sum = to_float(load<T>(own, i));
    for (size_t c = 0; c < contribution_count; ++c) {
      const char* right = static_cast<const char*>(contributions[c].data);
      sum = Op::apply(
          sum, contributions[c].accumulated ? load<float>(right, i) : to_float(load<T>(right, i)));
    }
    Out value;
    from_float(finish(sum), &value);
    store<Out>(out, i, value);
  }
}

template <class T, class Acc, class Op, class Finish>
void run_in_blocks(const char* own, const Contribution* contributions, size_t contribution_count,
                   bool final, char* out, size_t count, Finish finish) {
  constexpr bool kWidens = !kSame<T, Acc>;
  constexpr size_t kBlock = 4096 / sizeof(Acc);
  alignas(64) Acc block[kBlock];
  alignas(64) Acc widened[kBlock];
  const bool narrows = kWidens && final;
  // A single pass needs no blocks.
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
      if constexpr (kWidens) narrow<T>(block, to, n, finish);
    } else if (contribution_count == 0) {
      finish_only<Acc>(left, to, n, finish);
    }
  }
}

template <class T, class Acc, class Op, class Finish>
void run(const char* own, const Contribution* contributions, size_t contribution_count, bool final,
         char* out, size_t count, Finish finish) {
  if constexpr (kInRegisters<T>) {
    final
        ? combine_in_registers<T, T, Op>(own, contributions, contribution_count, out, count, finish)
        : combine_in_registers<T, float, Op>(own, contributions, contribution_count, out, count,
                                             finish);
  } else {
    run_in_blocks<T, Acc, Op>(own, contributions, contribution_count, final, out, count, finish);
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

// A complex number is combined as two `Part`s.
template <class Part, bool kAverage>
void complex_kernel(const void* own, const Contribution* contributions, size_t contribution_count,
                    unsigned divisor, void* out, size_t count) {
  kernel<Part, Part, Add, kAverage>(own, contributions, contribution_count, divisor, out,
                                    2 * count);
}

}  // namespace
}  // namespace pccl::reduce

#include "pccl/reduce/codes.inl"

namespace pccl::reduce {

// Columns as in ReduceOp: sum, avg, prod, max, min.
#define PCCL_KERNEL_ROW(T, Acc, AverageAcc)                                \
  {                                                                        \
    &kernel<T, Acc, Add, false>, &kernel<T, AverageAcc, Add, true>,        \
        &kernel<T, Acc, Multiply, false>, &kernel<T, Acc, Maximum, false>, \
        &kernel<T, Acc, Minimum, false>                                    \
  }
#define PCCL_COMPLEX_ROW(Part) \
  { &complex_kernel<Part, false>, &complex_kernel<Part, true>, nullptr, nullptr, nullptr }

// Rows as in DataType.
const KernelTable PCCL_KERNEL_TABLE = {
    {
        PCCL_KERNEL_ROW(uint8_t, uint8_t, uint64_t),
        PCCL_KERNEL_ROW(int8_t, int8_t, int64_t),
        PCCL_KERNEL_ROW(int16_t, int16_t, int64_t),
        PCCL_KERNEL_ROW(uint16_t, uint16_t, uint64_t),
        PCCL_KERNEL_ROW(uint32_t, uint32_t, uint64_t),
        PCCL_KERNEL_ROW(int32_t, int32_t, int64_t),
        PCCL_KERNEL_ROW(uint64_t, uint64_t, Uint128),
        PCCL_KERNEL_ROW(int64_t, int64_t, Int128),
        PCCL_KERNEL_ROW(Float16, float, float),
        PCCL_KERNEL_ROW(Bfloat16, float, float),
        PCCL_KERNEL_ROW(float, float, float),
        PCCL_KERNEL_ROW(double, double, double),
        {nullptr, nullptr, nullptr, &kernel<uint8_t, uint8_t, Maximum, false>,
         &kernel<uint8_t, uint8_t, Minimum, false>},
        PCCL_KERNEL_ROW(Float8E4m3fn, float, float),
        PCCL_KERNEL_ROW(Float8E5m2, float, float),
        PCCL_COMPLEX_ROW(float),
        PCCL_COMPLEX_ROW(double),
    },
    {&encode_block<float>, &encode_block<double>},
    {&decode_block<float>, &decode_block<double>},
    {&narrow_elements<Float16>, &narrow_elements<Bfloat16>, &narrow_elements<Float8E4m3fn>,
     &narrow_elements<Float8E5m2>},
};

#undef PCCL_KERNEL_ROW
#undef PCCL_COMPLEX_ROW
#undef PCCL_INDEPENDENT

}  // namespace pccl::reduce
