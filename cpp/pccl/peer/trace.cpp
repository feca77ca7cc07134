#include "pccl/peer/trace.h"

#include <utility>

#include "pccl/peer/calls.h"

namespace pccl::peer {

void Tracer::moved(const wire::OpKey& key, const PeerId& peer, bool sent, std::uint64_t bytes,
                   Instant now) {
  const FlowKey which{key, peer, sent};
  auto it = flows_.find(which);
  if (it == flows_.end()) {
    if (flows_.size() >= kMaxFlows) return;
    it = flows_.emplace(which, TracedFlow{key, peer, sent, now, now, 0}).first;
  }
  it->second.last = now;
  it->second.bytes += bytes;
}

void Tracer::ended(const Call& call, Code code) {
  const auto* const key = std::get_if<wire::OpKey>(&call.key);
  if (key == nullptr || call.attempts == 0) return;
  bool in_memory = true;
  auto it = flows_.lower_bound(FlowKey{*key, PeerId{}, false});
  while (it != flows_.end() && it->second.key == *key) {
    in_memory = false;
    events_.emplace_back(it->second);
    it = flows_.erase(it);
  }
  events_.emplace_back(
      TracedCall{*key, call.timing.marks(), code, call.bytes, call.attempts, in_memory});
}

void Tracer::epoch(const std::shared_ptr<const wire::EpochRecord>& record, std::uint64_t run,
                   Instant now) {
  events_.emplace_back(TracedEpoch{now, run, record});
  // A number restarts at 0, and calls that were not made have ended.
  if (record->cause == wire::Cause::admission) flows_.clear();
}

}  // namespace pccl::peer
