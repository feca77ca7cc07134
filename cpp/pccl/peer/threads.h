// The caller's threads, and the calls in which they wait. The master uses this to find deadlocks.
// The engine's own threads are in io/loop.h and io/workers.h. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "pccl/base/ids.h"
#include "pccl/peer/calls.h"
#include "pccl/wire/messages.h"

namespace pccl::peer {

// *one thread: the engine's*. `thread` is any number that names a thread of the caller.
class Threads {
 public:
  // A thread counts as blocked when it has waited this long.
  static constexpr Duration kBlockedAfter = wire::Blocked::kAfter;

  void inside(std::uint64_t thread) { threads_.try_emplace(thread); }
  void outside(std::uint64_t thread) { continues(thread); }
  void waits(std::uint64_t thread, const CallPtr& call, Instant now);
  void continues(std::uint64_t thread);
  void ended(std::uint64_t thread);

  // Returns the calls in which threads are blocked. `proceeds(call)`: the call does not wait for a
  // call of another member, or may be over. `moving` is not filled in.
  template <class Proceeds>
  [[nodiscard]] wire::Blocked look(const Proceeds& proceeds, Instant now) const {
    wire::Blocked blocked;
    blocked.multi_threaded = threads_.size() > 1;
    for (const auto& [thread, state] : threads_) {
      // A thread that began to wait a moment ago, or is about to continue, counts as outside.
      const bool waits = state.call != nullptr && !state.call->done &&
                         now - state.since >= kBlockedAfter && !proceeds(state.call);
      blocked.outside = blocked.outside || !waits;
      if (waits && blocked.waits.size() < kMaxWaits) blocked.waits.push_back(state.call->key);
    }
    return blocked;
  }
  // Records whether the latest report to the master named blocked threads.
  void reported(bool blocked) { reported_ = blocked; }
  [[nodiscard]] bool reported() const { return reported_; }
  // True once after a thread that was reported as blocked has continued: withdraw the report.
  [[nodiscard]] bool has_correction() const { return correction_; }
  [[nodiscard]] bool take_correction() { return std::exchange(correction_, false); }

 private:
  static constexpr std::size_t kMaxWaits = 1024;  // calls in one report
  struct Thread {
    CallPtr call;  // in which it waits; null: none
    Instant since{};
  };
  std::map<std::uint64_t, Thread> threads_;
  bool reported_ = false;
  bool correction_ = false;
};

}  // namespace pccl::peer
