// The caller's threads: which of them wait in which call. The master finds deadlocks with it. Pure.
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
  // A thread counts as blocked when it has waited for so long.
  static constexpr Duration kBlockedAfter = std::chrono::seconds(1);

  void inside(std::uint64_t thread) { threads_[thread].inside = true; }
  void outside(std::uint64_t thread);
  void waits(std::uint64_t thread, const CallPtr& call, Instant now);
  void continues(std::uint64_t thread);
  void ended(std::uint64_t thread);

  // Which threads are blocked. `proceeds(call)`: the call does not wait for a call of another
  // member, or may be over. `moving` is not filled in.
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
  // The master was told that threads are blocked (or that none is).
  void told(bool blocked) { told_ = blocked; }
  [[nodiscard]] bool told() const { return told_; }
  // A thread that the master takes for blocked has continued: the master must hear it. Once.
  [[nodiscard]] bool take_correction() { return std::exchange(correction_, false); }

 private:
  static constexpr std::size_t kMaxWaits = 1024;  // the master hears of no more
  struct Thread {
    bool inside = false;
    CallPtr call;  // it waits in
    Instant since{};
  };
  std::map<std::uint64_t, Thread> threads_;
  bool told_ = false;
  bool correction_ = false;
};

}  // namespace pccl::peer
