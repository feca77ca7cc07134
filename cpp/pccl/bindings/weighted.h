// One member's part in a weighted mean, for calls that Python does not make. It sends the same
// arrays as the Python layer, so both kinds of calls meet.
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
  // An invalid weight is sent as such, so that all members get an error.
  explicit WeightedMean(double weight)
      : given_(weight), weight_(reduce::as_weight(weight)), own_{weight_, 1} {}
  WeightedMean(const WeightedMean&) = delete;
  WeightedMean& operator=(const WeightedMean&) = delete;

  // The mean of `from` will be in `to`, which is also used on the way. They are the same memory or
  // do not overlap.
  void add(const void* from, void* to, std::size_t count, DataType dtype) {
    parts_.push_back({from, to, count, dtype, {}});
  }

  // Computes the products, and requests their sum, in place. REQUIRES: called once, after all
  // arrays; this object outlives the operation.
  void scale(peer::OperationRequest& request);

  // Computes the means from the sums, and returns the members' mean weight. An error, with nothing
  // written: the weights add up to 0, or one was invalid.
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
