// The weighted mean, sum(w x) / sum(w): a member's products, and the mean from their sum.
//
// Pure functions on memory. All processors give the same bytes in the default floating-point
// environment, so that all members get the same mean.
#pragma once

#include <cstddef>

#include "pccl/base/dtype.h"

namespace pccl::reduce {

// With other weights, products could underflow or overflow in float32 although the mean does not.
inline constexpr double kLeastWeight = 1e-18;
inline constexpr double kMostWeight = 1e18;
inline constexpr const char* kWeights = "0, or a number from 1e-18 to 1e18";  // for errors

// The number, or NaN if it is not a valid weight. A member with an invalid weight takes part with
// NaN, and the sum of weights shows it to all members.
[[nodiscard]] double as_weight(double number);

// The type of products and of their sums.
[[nodiscard]] constexpr DataType product_type(DataType dtype) {
  switch (dtype) {
    case DataType::float16:
    case DataType::bfloat16:
    case DataType::float8_e4m3fn:
    case DataType::float8_e5m2:
    case DataType::float32:
      return DataType::float32;
    case DataType::complex64:
    case DataType::complex128:
      return dtype;
    default:
      return DataType::float64;
  }
}

// products[i] = values[i] * weight, in product_type(dtype). 0 unless weight > 0, even for
// infinities and NaNs.
//
// For both functions: no pointer needs alignment. REQUIRES: the two arrays are the same memory,
// with elements of the same size, or do not overlap.
void scale(DataType dtype, const void* values, double weight, void* products, std::size_t count);

// means[i] = sums[i] / total as an element of `dtype`, divided in float64. Floats round to nearest
// (bfloat16 and 8-bit floats via float32; complex numbers part by part), integers toward zero and
// within their range. A quotient within rounding error of a whole number is that number, so that
// the mean of 3 and 3 is 3 with any weights. REQUIRES: total > 0.
void unscale(DataType dtype, const void* sums, double total, void* means, std::size_t count);

}  // namespace pccl::reduce
