// Log lines for the user about peers that joined and members that were lost. Pure.
#pragma once

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

 private:
  std::vector<PeerId> members_;  // in rank order; empty: there was no epoch yet
  std::vector<std::string> lines_;
};

}  // namespace pccl::peer
