// One member's part in a weighted mean, for calls that Python does not make: what travels is the
// same as in pccl/reduce/weighted.py, so both meet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/peer/engine.h"
#include "pccl/reduce/weighted.h"

namespace pccl::bindings {

// The arrays' memory stays its caller's. *one thread*
class WeightedMean {
 public:
  // What is no weight takes part as such, and all members are told.
  explicit WeightedMean(double weight)
      : given_(weight), weight_(reduce::as_weight(weight)), own_{weight_, 1} {}
  WeightedMean(const WeightedMean&) = delete;
  WeightedMean& operator=(const WeightedMean&) = delete;

  // The mean of `from` is to be in `to`, which may be the same memory and is used on the way. They
  // do not overlap otherwise.
  void add(const void* from, void* to, std::size_t count, DataType dtype) {
    parts_.push_back({from, to, count, dtype, {}});
  }

  // Makes the products and asks for their sum, in place. REQUIRES: once, after all arrays; this
  // object lives as long as the operation.
  void scale(peer::OperationRequest& request);

  // Makes the means of the sums. Returns the members' mean weight; an error, and nothing is
  // written, when the weights add up to nothing, or one was none.
  [[nodiscard]] Result<double> finish();

 private:
  struct Part {
    const void* from;
    void* to;
    std::size_t count;
    DataType dtype;
    std::unique_ptr<std::byte[]> products;  // null: they are in `to`
    [[nodiscard]] void* sums() const { return products == nullptr ? to : products.get(); }
  };

  [[nodiscard]] Error unfit(double total) const;

  const double given_;
  const double weight_;
  double own_[2];  // summed over the members, with the products: the weight, and a one
  std::vector<Part> parts_;
};

}  // namespace pccl::bindings
