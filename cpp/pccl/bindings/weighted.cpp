#include "pccl/bindings/weighted.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "pccl/base/floats.h"
#include "pccl/bindings/common.h"

namespace pccl::bindings {

void WeightedMean::scale(peer::OperationRequest& request) {
  for (Part& part : parts_) {
    const DataType wide = reduce::product_type(part.dtype);
    // A member that turns out to be alone needs its input again.
    if (part.from == part.to || element_size(wide) != element_size(part.dtype))
      part.products = std::make_unique_for_overwrite<std::byte[]>(part.count * element_size(wide));
    reduce::scale(part.dtype, part.from, weight_, part.sums(), part.count);
    request.arrays.push_back({part.sums(), part.sums(), part.count, wide});
  }
  request.arrays.push_back({own_, own_, 2, DataType::float64});
  request.op = ReduceOp::sum;
}

Result<double> WeightedMean::finish() {
  const auto [total, members] = own_;
  if (!(total > 0)) return unfit(total);
  for (const Part& part : parts_) {
    if (members == 1) {  // the exact input, since a product and a quotient would round
      if (part.to != part.from && part.count != 0)
        std::memcpy(part.to, part.from, part.count * element_size(part.dtype));
    } else {
      reduce::unscale(part.dtype, part.sums(), total, part.to, part.count);
    }
  }
  return total / members;
}

Error WeightedMean::unfit(double total) const {
  Error error{Code::invalid_argument, {}};
  if (total == 0) {
    error.reason = "the members' weights add up to 0";
  } else if (std::isnan(weight_)) {
    char given[32];
    std::snprintf(given, sizeof given, "%g", given_);
    error.reason = std::string("weight= must be ") + reduce::kWeights + ", not " + given;
  } else {
    error.reason = std::string("a member's weight is not ") + reduce::kWeights;
  }
  return error;
}

namespace {

using Input = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The number of elements of `dtype`, which is the same in both arrays.
std::size_t elements(unsigned dtype, std::size_t bytes, std::size_t wide_bytes) {
  if (dtype < kDataTypeCount) {
    const auto type = static_cast<DataType>(dtype);
    const std::size_t count = bytes / element_size(type);
    if (count * element_size(type) == bytes &&
        count * element_size(reduce::product_type(type)) == wide_bytes) {
      return count;
    }
  }
  throw nb::value_error("the arrays have different sizes");
}

}  // namespace

void bind_weighted(nb::module_& m) {
  m.attr("WEIGHTS") = reduce::kWeights;
  m.def("as_weight", &reduce::as_weight, "number"_a);
  m.def(
      "scale",
      [](unsigned dtype, const Input& values, double weight, const Output& products) {
        const std::size_t count = elements(dtype, values.size(), products.size());
        const GilRelease release;
        const DefaultFloats defaults;
        reduce::scale(static_cast<DataType>(dtype), values.data(), weight, products.data(), count);
      },
      "dtype"_a, nb::arg("values").noconvert(), "weight"_a, nb::arg("products").noconvert());
  m.def(
      "unscale",
      [](unsigned dtype, const Input& sums, double total, const Output& means,
         const std::optional<Output>& done) {
        const std::size_t count = elements(dtype, means.size(), sums.size());
        if (done && done->size() != 1) throw nb::value_error("done is not one byte");
        // No handler of a signal runs between the mark and the division.
        if (done && std::exchange(*done->data(), std::uint8_t{1}) != 0) return;
        const GilRelease release;
        const DefaultFloats defaults;
        reduce::unscale(static_cast<DataType>(dtype), sums.data(), total, means.data(), count);
      },
      "dtype"_a, nb::arg("sums").noconvert(), "total"_a, nb::arg("means").noconvert(),
      nb::arg("done").noconvert().none() = nb::none());
}

}  // namespace pccl::bindings
