// Rate limits on events that other processes can cause: a token bucket with a burst and a rate.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "pccl/base/ids.h"

namespace pccl {

struct Rate {
  double at_once = 0;
  double per_second = 0;
};

// *one thread*
class Allowance {
 public:
  // Takes `times` tokens. False: fewer were left, and none was taken. REQUIRES: `now` never
  // decreases.
  bool take(const Rate& rate, Instant now, double times = 1) {
    const double passed = in_seconds(now - at_);
    used_ = at_ == Instant{} ? 0 : std::max(0.0, used_ - passed * rate.per_second);
    at_ = now;
    if (used_ + times > rate.at_once) return false;
    used_ += times;
    return true;
  }

 private:
  double used_ = 0;
  Instant at_{};
};

// Limits log lines that strangers can cause: ten at once, then ten a minute. *one thread*
class RareLines {
 public:
  // Returns the line to log, with the number of lines dropped before it. Empty: drop this line.
  std::optional<std::string> line(std::string text, Instant now) {
    if (!allowance_.take({10, 1.0 / 6}, now)) {
      ++left_out_;
      return std::nullopt;
    }
    const std::uint64_t before = std::exchange(left_out_, 0);
    if (before > 0) text += " (" + std::to_string(before) + " lines like this were left out)";
    return text;
  }

 private:
  Allowance allowance_;
  std::uint64_t left_out_ = 0;
};

}  // namespace pccl
