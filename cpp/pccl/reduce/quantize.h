// Quantization: elements are sent as small codes, block by block.
//
// Each block of a few hundred elements has a range. An element is encoded as the nearest of 256
// steps in this range (8 bits), of 16 steps (4 bits), or of the 8-bit floats (e4m3) scaled to the
// block's largest magnitude. The error is at most half a step, or a whole step with stochastic
// rounding.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pccl/base/dtype.h"

namespace pccl::reduce {

enum class CodeType : std::uint8_t { none = 0, bits8 = 1, bits4 = 2, float8 = 3 };

struct Quantization {
  CodeType code = CodeType::none;
  // The range of every block includes zero, on a step. Otherwise a range extends from the block's
  // least to its largest element.
  bool zero_exact = false;
  // Rounds up or down at random so that the expected value is the value itself.
  bool stochastic = false;
  std::uint32_t block = 512;  // elements that share a range
  explicit operator bool() const { return code != CodeType::none; }
};

inline constexpr std::uint32_t kMinBlock = 64;
inline constexpr std::uint32_t kMaxBlock = 4096;

[[nodiscard]] bool valid(const Quantization& how);

// Bytes of an encoded run of `count` elements. `work`: the type of the values, float32 or float64.
[[nodiscard]] std::size_t coded_size(const Quantization& how, DataType work, std::size_t count);

// Convert the elements [first, first + part) of a run of `count` between values of the type `work`
// and the run's codes. Encoding depends on the arguments only (on `seed` only with `stochastic`).
// Decoding gives the same bytes on every processor.
//
// An element that is not finite is preserved (every NaN as the positive quiet one). It does not
// extend its block's range, but costs the block three of its steps.
//
// REQUIRES: valid(how); how.code is not none; `first` is a multiple of the block; `values` are
// aligned; `values` and `coded` do not overlap.
void encode(const Quantization& how, DataType work, const void* values, std::size_t first,
            std::size_t part, std::size_t count, std::uint64_t seed, void* coded);
void decode(const Quantization& how, DataType work, const void* coded, std::size_t first,
            std::size_t part, std::size_t count, void* values);

// left[i] = (values[i] - decoded[i]) * scale, or 0 where that is not finite. REQUIRES: all arrays
// are aligned and of the type `work`.
void left_out(DataType work, const void* values, const void* decoded, double scale, void* left,
              std::size_t count);

// Rounds values of the accumulation type of a floating `dtype` to values of `dtype`. Values that
// are too large become infinite. `elements`: scratch memory for `count` elements.
void fit(DataType dtype, void* values, void* elements, std::size_t count);

// Converts values of the accumulation type of a floating `dtype` to elements. Finite values that
// are too large become the largest element.
void narrow(DataType dtype, const void* values, void* elements, std::size_t count);

}  // namespace pccl::reduce
