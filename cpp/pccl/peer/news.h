// Peers that joined and members that were lost: log lines for the user, and what a program can ask.
// Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/wire/records.h"

namespace pccl::peer {

// *one thread: the engine's*
class MembershipNews {
 public:
  // Adds lines for a new epoch. Departed members have their ranks of the previous epoch.
  void note(const wire::EpochRecord& record);
  // Takes the lines that were not logged yet. The engine logs them only while a call is under way
  // or when the next one begins: at the end of a run all members leave, in any order.
  [[nodiscard]] std::vector<std::string> take() { return std::exchange(lines_, {}); }

  // Peers that were let in, and members that were lost, since this peer's admission.
  [[nodiscard]] std::uint64_t joined() const { return joined_; }
  [[nodiscard]] std::uint64_t lost() const { return lost_; }
  // The latest departures, the newest last. At most kRemembered.
  static constexpr std::size_t kRemembered = 256;
  [[nodiscard]] const std::deque<wire::Departure>& departures() const { return departures_; }

 private:
  std::vector<PeerId> members_;  // in rank order; empty: there was no epoch yet
  std::vector<std::string> lines_;
  std::deque<wire::Departure> departures_;
  std::uint64_t joined_ = 0;
  std::uint64_t lost_ = 0;
};

}  // namespace pccl::peer
