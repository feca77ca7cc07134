// Decides whether a thread that waits for events polls for a while before it sleeps. Pure.
#pragma once

#include <chrono>

#include "pccl/base/ids.h"

namespace pccl::io {

// To fall asleep and to be woken takes longer than many events take to come, above all on virtual
// machines. So polling pays while events come soon. Between two polls the thread gives its core to
// other threads. Where other programs compute all the time it gets the core back much later, so it
// does not poll there (docs/internals/decisions/088-polling-before-sleeping.md).
class Polling {
 public:
  static constexpr Duration kLength = std::chrono::microseconds(100);
  static constexpr Duration kShortWait = std::chrono::microseconds(200);
  static constexpr Duration kLongYield = std::chrono::milliseconds(1);
  static constexpr Duration kCrowded = std::chrono::seconds(1);

  // For how long to poll before the thread sleeps.
  [[nodiscard]] Duration length(Instant now) const {
    return waits_are_short_ && now >= crowded_until_ ? kLength : Duration{};
  }
  // A wait is over, and the event is handled.
  void waited(Duration length) { waits_are_short_ = length < kShortWait; }
  // The thread has its core again.
  void yielded(Duration length, Instant now) {
    if (length >= kLongYield) crowded_until_ = now + kCrowded;
  }

 private:
  bool waits_are_short_ = false;
  Instant crowded_until_{};
};

}  // namespace pccl::io
