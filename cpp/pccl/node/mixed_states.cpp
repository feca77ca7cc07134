#include "pccl/node/mixed_states.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "pccl/base/fork.h"

namespace pccl::node {
namespace {

constexpr std::size_t kMaxKept = 16;  // the latest ones

struct OfProcess {
  std::uint64_t generation = fork_generation();
  MixedStates states;
};

}  // namespace

MixedStates& MixedStates::of_process() {
  // Never destroyed. The mutex of a copy in a forked child may be locked for good, so the child
  // leaves the copy alone.
  static std::atomic<OfProcess*> current{nullptr};
  OfProcess* found = current.load();
  if (found == nullptr || found->generation != fork_generation()) {
    auto* const made = new OfProcess;
    if (current.compare_exchange_strong(found, made)) {
      found = made;
    } else {
      delete made;
    }
  }
  return found->states;
}

void MixedStates::note(const state::LocalState& state) {
  Mixed mixed;
  for (const state::LocalEntry& entry : state.entries)
    if (entry.overwritten) mixed.entries[entry.what.name] = entry.what.content;
  const std::lock_guard lock(mutex_);
  mixed.number = ++last_;
  states_.push_back(std::move(mixed));
  if (states_.size() > kMaxKept) states_.pop_front();
}

std::optional<std::uint64_t> MixedStates::find(const state::LocalState& state) {
  const std::lock_guard lock(mutex_);
  for (const Mixed& mixed : states_) {
    const auto same = std::ranges::count_if(state.entries, [&](const state::LocalEntry& entry) {
      const auto it = mixed.entries.find(entry.what.name);
      return it != mixed.entries.end() && it->second == entry.what.content;
    });
    if (static_cast<std::size_t>(same) == mixed.entries.size()) return mixed.number;
  }
  return std::nullopt;
}

void MixedStates::forget(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  std::erase_if(states_, [&](const Mixed& mixed) { return mixed.number == number; });
}

}  // namespace pccl::node
