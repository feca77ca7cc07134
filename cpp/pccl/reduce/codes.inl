// Kernels of reduce/quantize.h, compiled once per instruction set as a part of kernels.inl.
//
// A block is [lowest value, step] and a code for each element: value = lowest + code * step. The
// loops are plain and the product is rounded before the sum, so that all processors decode the
// same. A block with elements that are not finite or very large is encoded carefully, with halves
// of all values, and marked by the step's sign.

namespace pccl::reduce {
namespace {

// For functions in vectorised loops.
#define PCCL_INLINE inline __attribute__((always_inline))

using Doubles = double __attribute__((vector_size(kVectorBytes)));

template <class W>
struct VectorOf;
template <>
struct VectorOf<float> {
  using type = Floats;
};
template <>
struct VectorOf<double> {
  using type = Doubles;
};

template <class W>
constexpr W kLeastNormal = 0x1p-126F;
template <>
constexpr double kLeastNormal<double> = 0x1p-1022;

template <class W>
constexpr W kLargest = 0x1.fffffep127F;
template <>
constexpr double kLargest<double> = 0x1.fffffffffffffp1023;

// Up to this magnitude the plain encoding cannot overflow.
template <class W>
constexpr W kLargestPlain = kLargest<W> / 8;

template <class W>
W sign_of(W value, W magnitude) {
  if constexpr (kSame<W, float>) {
    return __builtin_copysignf(magnitude, value);
  } else {
    return __builtin_copysign(magnitude, value);
  }
}

// -- random numbers by element index

// A number between 0 and 1, far enough from both that a value within rounding error of a step gets
// that step.
PCCL_INLINE float random_part(uint64_t seed, uint32_t index) {
  uint32_t word = index * 0x9e3779b1U + static_cast<uint32_t>(seed);
  word = (word ^ (word >> 15)) * 0x85ebca77U ^ static_cast<uint32_t>(seed >> 32);
  word = (word ^ (word >> 13)) * 0xc2b2ae3dU;
  word ^= word >> 16;
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * (0x1p-24F - 0x1p-36F) + 0x1p-13F;
}

PCCL_INLINE uint32_t random_bits(uint64_t seed, uint32_t index) {
  return static_cast<uint32_t>(static_cast<int32_t>(random_part(seed, index) * 0x1p20F));
}

// -- 8-bit floats: a sign, 4 bits of exponent, 3 of mantissa (e4m3: no infinities)

constexpr float kLargestFloat8 = 448.0F;
constexpr float kLargestBeside = 416.0F;  // in careful blocks, where 448 means infinity
constexpr uint8_t kFloat8Nan = 0x7f;
constexpr uint8_t kFloat8Infinity = 0x7e;

// Branch-free, so that loops can be vectorised.
PCCL_INLINE uint32_t choose(bool first, uint32_t a, uint32_t b) {
  const uint32_t mask = 0U - static_cast<uint32_t>(first);
  return (a & mask) | (b & ~mask);
}

// Larger magnitudes become `largest`. `nudge`: added before truncation, in units of 2^-20 of the
// last bit kept.
PCCL_INLINE uint8_t to_float8(float value, float largest, bool nearest, uint32_t nudge) {
  const uint32_t bits = bit_copy<uint32_t>(value);
  const uint32_t most = bit_copy<uint32_t>(largest);
  const uint32_t given = bits & 0x7fffffffU;
  const uint32_t magnitude = given < most ? given : most;
  const uint32_t odd = (magnitude >> 20) & 1U;
  const uint32_t normal = (magnitude - (120U << 23) + (nearest ? 0x7ffffU + odd : nudge)) >> 20;
  // Below 2^-6: multiples of 2^-9. Adding 2^14 rounds to them.
  const float small = bit_copy<float>(magnitude);
  const uint32_t rounded = bit_copy<uint32_t>(small + 0x1p14F) - bit_copy<uint32_t>(0x1p14F);
  const auto drawn = static_cast<uint32_t>(static_cast<int32_t>(
      small * 0x1p9F + static_cast<float>(static_cast<int32_t>(nudge)) * 0x1p-20F));
  const uint32_t tiny = nearest ? rounded : drawn;
  const uint32_t code = choose(magnitude < (121U << 23), tiny, normal);
  return static_cast<uint8_t>(code | ((bits >> 24) & 0x80U));
}

PCCL_INLINE float from_float8(uint8_t code) {
  const uint32_t magnitude = code & 0x7fU;
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9F;
  const uint32_t normal = (magnitude << 20) + (120U << 23);
  const uint32_t value = choose(magnitude < 8, bit_copy<uint32_t>(small), normal);
  return bit_copy<float>(value | (static_cast<uint32_t>(code & 0x80U) << 24));
}

// -- ranges

template <class W>
struct Span {
  W low;
  W high;
  bool finite;  // all values are finite
};

template <class W>
Span<W> span_of(const char* from, size_t count) {
  using Vector = typename VectorOf<W>::type;
  constexpr size_t kWide = kVectorBytes / sizeof(W);
  constexpr size_t kRow = 4;
  const W first = load<W>(from, 0);
  Span<W> span{first, first, true};
  W odd = first - first;  // NaN once a value is not finite
  size_t i = 0;
  if (count >= kRow * kWide) {
    Vector low[kRow];
    Vector high[kRow];
    Vector odds[kRow];
    for (size_t r = 0; r < kRow; ++r) {
      low[r] = high[r] = load_vector<Vector>(from + r * kVectorBytes);
      odds[r] = low[r] - low[r];
    }
    for (i = kRow * kWide; i + kRow * kWide <= count; i += kRow * kWide) {
      for (size_t r = 0; r < kRow; ++r) {
        const Vector value = load_vector<Vector>(from + i * sizeof(W) + r * kVectorBytes);
        low[r] = value < low[r] ? value : low[r];
        high[r] = value > high[r] ? value : high[r];
        odds[r] += value - value;
      }
    }
    for (size_t r = 0; r < kRow; ++r) {
      for (size_t lane = 0; lane < kWide; ++lane) {
        if (low[r][lane] < span.low) span.low = low[r][lane];
        if (high[r][lane] > span.high) span.high = high[r][lane];
        odd += odds[r][lane];
      }
    }
  }
  for (; i < count; ++i) {
    const W value = load<W>(from, i);
    if (value < span.low) span.low = value;
    if (value > span.high) span.high = value;
    odd += value - value;
  }
  span.finite = odd == 0;
  return span;
}

// The span of the finite values; zeros if there are none.
template <class W>
Span<W> finite_span(const char* from, size_t count) {
  Span<W> span{0, 0, false};
  bool any = false;
  for (size_t i = 0; i < count; ++i) {
    const W value = load<W>(from, i);
    if (value - value != 0) continue;
    if (!any || value < span.low) span.low = value;
    if (!any || value > span.high) span.high = value;
    any = true;
  }
  return span;
}

// -- codes

// Packs 4-bit codes: the first half of a block in the low bits.
inline void pack(const uint8_t* codes, size_t count, char* to) {
  const size_t half = (count + 1) / 2;
  const size_t rest = count - half;
  for (size_t i = 0; i < rest; ++i)
    store<uint8_t>(to, i, static_cast<uint8_t>(codes[i] | (codes[half + i] << 4)));
  if (rest < half) store<uint8_t>(to, rest, codes[rest]);
}

inline void unpack(const char* from, size_t count, uint8_t* codes) {
  const size_t half = (count + 1) / 2;
  for (size_t i = 0; i < half; ++i) codes[i] = load<uint8_t>(from, i) & 0xfU;
  for (size_t i = 0; i < count - half; ++i)
    codes[half + i] = static_cast<uint8_t>(load<uint8_t>(from, i) >> 4);
}

// Rounds up to a whole number of steps. REQUIRES: 0 <= steps < 2^31.
template <class W>
W step_above(W steps) {
  const W below = static_cast<W>(static_cast<int32_t>(steps));
  return below < steps ? below + 1 : below;
}

// The number of steps in a range.
inline uint32_t steps_of(const Quantization& how) { return how.code == CodeType::bits4 ? 15 : 255; }

// For finite values with a finite range.
template <class W>
void encode_plain(const Quantization& how, const char* from, size_t count, W low, W inverse,
                  uint64_t seed, size_t first, uint8_t* codes) {
  const auto top = static_cast<W>(steps_of(how));
  const auto index = static_cast<uint32_t>(first);
  if (how.stochastic) {
    PCCL_INDEPENDENT
    for (size_t i = 0; i < count; ++i) {
      const W at = (load<W>(from, i) - low) * inverse +
                   static_cast<W>(random_part(seed, index + static_cast<uint32_t>(i)));
      codes[i] = static_cast<uint8_t>(static_cast<int32_t>(at < top ? at : top));
    }
    return;
  }
  PCCL_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    const W at = (load<W>(from, i) - low) * inverse + static_cast<W>(0.5);
    codes[i] = static_cast<uint8_t>(static_cast<int32_t>(at < top ? at : top));
  }
}

template <class W>
void encode_float8(const Quantization& how, const char* from, size_t count, W inverse,
                   uint64_t seed, size_t first, uint8_t* codes) {
  const auto index = static_cast<uint32_t>(first);
  if (how.stochastic) {
    PCCL_INDEPENDENT
    for (size_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(load<W>(from, i) * inverse);
      codes[i] = to_float8(value, kLargestFloat8, false,
                           random_bits(seed, index + static_cast<uint32_t>(i)));
    }
    return;
  }
  PCCL_INDEPENDENT
  for (size_t i = 0; i < count; ++i)
    codes[i] = to_float8(static_cast<float>(load<W>(from, i) * inverse), kLargestFloat8, true, 0);
}

// Three codes are reserved: `special` is minus infinity, then infinity and NaN.
template <class W>
void encode_careful(const Quantization& how, const char* from, size_t count, uint64_t seed,
                    size_t first, W* low_out, W* step_out, uint8_t* codes) {
  const Span<W> span = finite_span<W>(from, count);
  const uint32_t special = steps_of(how) - 2;
  const bool floating = how.code == CodeType::float8;
  W low = span.low;
  W high = span.high;
  if (how.zero_exact || floating) {
    if (low > 0) low = 0;
    if (high < 0) high = 0;
  }
  const auto top = static_cast<W>(special - 1);
  const bool points = how.zero_exact && !floating;
  // Halves: the difference itself may overflow.
  W half_step = (high / 2 - low / 2) / (points ? top - 1 : top);
  if (floating) half_step = (high > -low ? high : -low) / 2 / static_cast<W>(kLargestBeside);
  if (!(half_step >= kLeastNormal<W>)) half_step = 0;
  W half_low = low / 2;
  if (points && half_step > 0) half_low = -(step_above(-half_low / half_step) * half_step);
  if (floating) half_low = 0;
  for (size_t i = 0; i < count; ++i) {
    const W value = load<W>(from, i);
    if (value != value) {
      codes[i] = floating ? kFloat8Nan : static_cast<uint8_t>(special + 2);
    } else if (value - value != 0) {
      codes[i] = floating ? static_cast<uint8_t>(kFloat8Infinity | (value < 0 ? 0x80U : 0U))
                          : static_cast<uint8_t>(special + (value < 0 ? 0 : 1));
    } else if (floating) {
      const W at = half_step > 0 ? value / 2 / half_step : 0;
      codes[i] = to_float8(static_cast<float>(at), kLargestBeside, !how.stochastic,
                           random_bits(seed, static_cast<uint32_t>(first + i)));
    } else {
      const W part = how.stochastic
                         ? static_cast<W>(random_part(seed, static_cast<uint32_t>(first + i)))
                         : static_cast<W>(0.5);
      const W at = half_step > 0 ? (value / 2 - half_low) / half_step + part : 0;
      codes[i] = static_cast<uint8_t>(static_cast<int32_t>(at < 0 ? 0 : at < top ? at : top));
    }
  }
  *low_out = half_low;
  *step_out = -half_step;
}

template <class W>
W twice(W half) {
  constexpr W kMost = kLargest<W> / 2;
  return (half > kMost ? kMost : half < -kMost ? -kMost : half) * 2;
}

template <class W>
void decode_careful(const Quantization& how, W half_low, W half_step, const uint8_t* codes,
                    size_t count, char* values) {
  const uint32_t special = steps_of(how) - 2;
  const bool floating = how.code == CodeType::float8;
  const W infinity = static_cast<W>(__builtin_inf());
  for (size_t i = 0; i < count; ++i) {
    const uint32_t code = codes[i];
    if (floating) {
      const W magnitude = static_cast<W>(from_float8(static_cast<uint8_t>(code))) * half_step;
      store<W>(values, i,
               (code & 0x7fU) == kFloat8Nan        ? canonical(infinity - infinity)
               : (code & 0x7fU) == kFloat8Infinity ? sign_of(magnitude, infinity)
                                                   : twice(magnitude));
    } else if (code >= special) {
      store<W>(values, i,
               code == special       ? -infinity
               : code == special + 1 ? infinity
                                     : canonical(infinity - infinity));
    } else {
      store<W>(values, i, twice(half_low + static_cast<W>(static_cast<int32_t>(code)) * half_step));
    }
  }
}

// -- blocks

template <class W>
void encode_block(const Quantization& how, const void* values, size_t count, uint64_t seed,
                  size_t first, void* range, void* codes) {
  const char* from = static_cast<const char*>(values);
  alignas(64) uint8_t wide[kMaxBlock];
  const bool packs = how.code == CodeType::bits4;
  uint8_t* to = packs ? wide : static_cast<uint8_t*>(codes);
  const bool floating = how.code == CodeType::float8;
  const Span<W> span = span_of<W>(from, count);
  W low = span.low;
  W high = span.high;
  if (how.zero_exact || floating) {
    if (low > 0) low = 0;
    if (high < 0) high = 0;
  }
  const W largest = high > -low ? high : -low;
  // With zero on a step, the range may begin below the lowest element, which takes one step.
  const bool points = how.zero_exact && !floating;
  W step = (high - low) / static_cast<W>(steps_of(how) - (points ? 1 : 0));
  if (floating) step = largest / static_cast<W>(kLargestFloat8);
  if (!span.finite || !(largest <= kLargestPlain<W>)) {
    encode_careful<W>(how, from, count, seed, first, &low, &step, to);
  } else {
    if (!(step >= kLeastNormal<W>)) step = 0;  // all values are equal, or nearly so
    const W inverse = step > 0 ? 1 / step : 0;
    if (floating) {
      low = 0;
      encode_float8<W>(how, from, count, inverse, seed, first, to);
    } else {
      if (points) low = -(step_above(-low * inverse) * step);
      encode_plain<W>(how, from, count, low, inverse, seed, first, to);
    }
  }
  store<W>(static_cast<char*>(range), 0, low);
  store<W>(static_cast<char*>(range), 1, step);
  if (packs) pack(wide, count, static_cast<char*>(codes));
}

template <class W>
void decode_block(const Quantization& how, const void* range, const void* codes, size_t count,
                  void* values) {
  const W low = load<W>(static_cast<const char*>(range), 0);
  const W step = load<W>(static_cast<const char*>(range), 1);
  const uint8_t* from = static_cast<const uint8_t*>(codes);
  alignas(64) uint8_t wide[kMaxBlock];
  if (how.code == CodeType::bits4) {
    unpack(static_cast<const char*>(codes), count, wide);
    from = wide;
  }
  char* const to = static_cast<char*>(values);
  if (sign_of(step, static_cast<W>(1)) < 0) {
    decode_careful<W>(how, low, -step, from, count, to);
  } else if (how.code == CodeType::float8) {
    PCCL_INDEPENDENT
    for (size_t i = 0; i < count; ++i) store<W>(to, i, static_cast<W>(from_float8(from[i])) * step);
  } else {
    PCCL_INDEPENDENT
    for (size_t i = 0; i < count; ++i)
      store<W>(to, i, low + static_cast<W>(static_cast<int32_t>(from[i])) * step);
  }
}

// The code of the largest number.
template <class T>
constexpr uint32_t kLargestBits = 0x7f7f;
template <class Bits, unsigned kExponent, unsigned kMantissa, bool kInfinities>
constexpr uint32_t kLargestBits<SmallFloat<Bits, kExponent, kMantissa, kInfinities>> =
    Format<kExponent, kMantissa, kInfinities>::kSpecial - 1;

template <class T>
void narrow_elements(const void* values, void* elements, size_t count, bool saturate) {
  const float* from = static_cast<const float*>(values);
  char* to = static_cast<char*>(elements);
  PCCL_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    T element;
    from_float(canonical(from[i]), &element);
    store<T>(to, i, element);
  }
  if (!saturate) return;
  using Bits = decltype(T::bits);
  constexpr unsigned kWidth = 8 * sizeof(Bits);
  constexpr uint32_t kSign = 1U << (kWidth - 1);
  PCCL_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = load<Bits>(to, i);
    const uint32_t wide = bit_copy<uint32_t>(from[i]);
    const uint32_t largest = ((wide >> (32 - kWidth)) & kSign) | kLargestBits<T>;
    const bool over = (wide & 0x7fffffffU) < 0x7f800000U && (bits & (kSign - 1)) > kLargestBits<T>;
    store<Bits>(to, i, static_cast<Bits>(choose(over, largest, bits)));
  }
}

}  // namespace
}  // namespace pccl::reduce

#undef PCCL_INLINE
