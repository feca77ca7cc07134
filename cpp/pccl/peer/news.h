// Lines for the user about who joined and who was lost. Pure.
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
  // A new epoch. Ranks of departed members are those of the epoch before.
  void note(const wire::EpochRecord& record);
  // Lines that the user was not told yet. A loss is told while a call is under way or when the next
  // one begins: at the end of a run all members leave, and their order does not matter.
  [[nodiscard]] std::vector<std::string> take() { return std::exchange(lines_, {}); }

 private:
  std::vector<PeerId> members_;  // in rank order; empty: there was no epoch yet
  std::vector<std::string> lines_;
};

}  // namespace pccl::peer
