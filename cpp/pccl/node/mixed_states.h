// States of this process that a failed sync has left with parts of another state. They are
// recognised by their content, so that a later communicator does not offer them either.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "pccl/state/manifest.h"

namespace pccl::node {

// *any thread*
class MixedStates {
 public:
  // Those of this process. A forked child begins with none.
  [[nodiscard]] static MixedStates& of_process();

  // REQUIRES: some entries were overwritten, and all hashes are known.
  void note(const state::LocalState& state);
  // The number of a state that was noted, and whose overwritten entries are as they were then.
  [[nodiscard]] std::optional<std::uint64_t> find(const state::LocalState& state);
  // The state is whole again, or was noted anew.
  void forget(std::uint64_t number);

 private:
  struct Mixed {
    std::uint64_t number = 0;
    std::map<std::string, wire::Digest> entries;  // that were overwritten
  };
  std::mutex mutex_;
  std::deque<Mixed> states_;
  std::uint64_t last_ = 0;
};

}  // namespace pccl::node
