// The weighted mean, sum(w x) / sum(w): what a member adds to the sum, and what is made of it.
//
// Pure functions on memory. Same bytes on every processor, under the default floating-point
// environment: members that made their parts in different ways get the same mean.
#pragma once

#include <cstddef>

#include "pccl/base/dtype.h"

namespace pccl::reduce {

// Other weights could make products that vanish or overflow in float32 while their sum does
// neither.
inline constexpr double kLeastWeight = 1e-18;
inline constexpr double kMostWeight = 1e18;
inline constexpr const char* kWeights = "0, or a number from 1e-18 to 1e18";  // for errors

// The number; NaN for one that is no weight. Its member takes part with that, so that the sum of
// the weights tells all of them.
[[nodiscard]] double as_weight(double number);

// What products, and sums of them, are made in.
[[nodiscard]] constexpr DataType product_type(DataType dtype) {
  switch (dtype) {
    case DataType::float16:
    case DataType::bfloat16:
    case DataType::float32:
      return DataType::float32;
    default:
      return DataType::float64;
  }
}

// products[i] = values[i] * weight, in product_type(dtype); 0 for a weight that is not above 0:
// of its member nothing counts, not even infinities and NaNs.
//
// For both: no pointer needs alignment. The two arrays may be the same memory where their elements
// have the same size, and do not overlap otherwise.
void scale(DataType dtype, const void* values, double weight, void* products, std::size_t count);

// means[i] = sums[i] / total, as an element of `dtype`: divided in float64; floats are rounded to
// nearest, bfloat16 by way of float32; integers toward zero, within their range, and a quotient
// within rounding of a whole number is that number: 3 is the mean of 3 and 3, whatever the weights.
// REQUIRES: total > 0.
void unscale(DataType dtype, const void* sums, double total, void* means, std::size_t count);

}  // namespace pccl::reduce
