// Fewer bits on the way: elements as small codes, block by block.
//
// Each block of some hundred elements has a range, and each element is a step in it: of 256 in 8
// bits, of 16 in 4 bits, or, as float8 (e4m3), one of the 8-bit floats scaled to the block's
// largest magnitude. What is decoded differs from what was encoded by at most half a step (a whole
// one with stochastic rounding).
#pragma once

#include <cstddef>
#include <cstdint>

#include "pccl/base/dtype.h"

namespace pccl::reduce {

enum class CodeType : std::uint8_t { none = 0, bits8 = 1, bits4 = 2, float8 = 3 };

struct Quantization {
  CodeType code = CodeType::none;
  // Zero is a step of every block, which reaches to zero then; else a block's steps go from its
  // least to its largest element.
  bool zero_exact = false;
  // Up or down at random, in proportion, so that the mean of many roundings is the value itself.
  bool stochastic = false;
  std::uint32_t block = 512;  // elements that share a range
  bool operator==(const Quantization&) const = default;
  explicit operator bool() const { return code != CodeType::none; }
};

inline constexpr std::uint32_t kMinBlock = 64;
inline constexpr std::uint32_t kMaxBlock = 4096;

[[nodiscard]] bool valid(const Quantization& how);

// Bytes of a run of `count` elements as codes. `work`: float32 or float64, what the values are.
[[nodiscard]] std::size_t coded_size(const Quantization& how, DataType work, std::size_t count);

// Elements first to first + part of a run of `count` (`first` is a multiple of the block) between
// values of the type `work` and the run's codes. Encoding is a function of its arguments: with
// `stochastic`, of `seed` too. What decodes is the same on every processor.
//
// An element that is not finite comes back as it is (every NaN as the positive quiet one). It takes
// no part in its block's range, and its neighbours then have three steps fewer.
//
// REQUIRES: valid(how), how.code is not none. `values` are aligned; `values` and `coded` do not
// overlap.
void encode(const Quantization& how, DataType work, const void* values, std::size_t first,
            std::size_t part, std::size_t count, std::uint64_t seed, void* coded);
void decode(const Quantization& how, DataType work, const void* coded, std::size_t first,
            std::size_t part, std::size_t count, void* values);

// left[i] = (values[i] - decoded[i]) * scale, and 0 where that is no finite number. All aligned, of
// the type `work`.
void left_out(DataType work, const void* values, const void* decoded, double scale, void* left,
              std::size_t count);

// Rounds values of the accumulation type of a floating `dtype` to its elements: those that are too
// large become infinite. `elements`: room for as many.
void fit(DataType dtype, void* values, void* elements, std::size_t count);

// Values of the accumulation type of a floating `dtype` as elements of it; the largest of them for
// finite ones that are a rounding error too large.
void narrow(DataType dtype, const void* values, void* elements, std::size_t count);

}  // namespace pccl::reduce
