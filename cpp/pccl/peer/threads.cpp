#include "pccl/peer/threads.h"

namespace pccl::peer {

void Threads::waits(std::uint64_t thread, const CallPtr& call, Instant now) {
  threads_[thread] = {call, now};
}

void Threads::continues(std::uint64_t thread) {
  const auto it = threads_.find(thread);
  if (it == threads_.end() || it->second.call == nullptr) return;
  it->second.call.reset();
  if (std::exchange(reported_, false)) correction_ = true;
}

void Threads::ended(std::uint64_t thread) {
  continues(thread);
  threads_.erase(thread);
}

}  // namespace pccl::peer
