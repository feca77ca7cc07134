// Stripes of one link that stand in for each other. When one ends, each end reports to the other
// how many frames had arrived on it. The later frames are sent again on the remaining stripes.
// Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <set>

#include "pccl/base/error.h"
#include "pccl/link/frame.h"
#include "pccl/link/stripe.h"

namespace pccl::link {

// *one thread: the engine's*
class Standby {
 public:
  // Frames queued to be sent again, and eager bytes dropped because their operation has ended.
  struct Settled {
    std::uint64_t sent_again = 0;
    std::uint64_t eager_unsent = 0;
  };

  // The stripe ended, or will never come up.
  [[nodiscard]] bool has_ended(std::uint32_t stripe) const;
  // False: the stripe was noted before. Always true for a number older than those that are kept.
  bool note_ended(std::uint32_t stripe);
  // More stripes have ended than an honest peer causes.
  [[nodiscard]] bool too_many_ended() const;

  // The stripe ended here after `received` whole frames. `left` may have to be sent again.
  void lose(const Lost& notice, LeftFrames left, Instant now);
  // Queues a notice for the other end.
  void tell(const Lost& notice);
  // More stripes wait for the other end's notice than are kept.
  [[nodiscard]] bool too_many_unsettled() const;
  // More notices wait to be sent than are kept.
  [[nodiscard]] bool too_many_notices() const;
  // The other end's notice for a stripe that ended here: queues the frames that did not arrive.
  // Error: the notice is impossible.
  [[nodiscard]] Result<Settled> settle(const Lost& notice);
  // A stripe has waited for the other end's notice for `patience` or longer.
  [[nodiscard]] bool overdue(Instant now, Duration patience) const;

  // True with a frame in `frame` that goes on any stripe, ahead of all others; false: none.
  [[nodiscard]] bool next(OutgoingFrame& frame);
  void push(OutgoingFrame frame) { notices_.push_back(std::move(frame)); }
  // Ends all use of the operation's memory. Returns the eager bytes of the dropped frames.
  std::uint64_t release(std::uint64_t token);
  // Payload bytes of the operation that wait to be sent again.
  [[nodiscard]] std::uint64_t unsent(std::uint64_t token) const;
  void add_unsent(UnsentBytes& by_token) const;

 private:
  struct Unsettled {
    LeftFrames left;
    Instant since{};
  };
  // Ended stripes: all below `all_ended_before_`, and those in `ended_`.
  std::set<std::uint32_t> ended_;
  std::uint32_t all_ended_before_ = 0;
  std::map<std::uint32_t, Unsettled> unsettled_;
  std::deque<OutgoingFrame> notices_;
  std::deque<OutgoingFrame> again_;
};

}  // namespace pccl::link
