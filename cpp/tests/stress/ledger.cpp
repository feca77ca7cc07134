#include "tests/stress/ledger.h"

#include <algorithm>
#include <string>

namespace pccl::stress {
namespace {

std::string describe(const Event& event) {
  std::string text = event.self.brief();
  if (event.kind == Event::Kind::failed) return text + " says it failed";
  text += " has committed it in epoch " + std::to_string(event.epoch) + " with";
  for (std::size_t i = 0; i < event.world; ++i) text += " " + event.members.at(i).brief();
  return text;
}

[[noreturn]] void violation(const Key& key, const std::string& what) {
  throw Violation("operation " + std::to_string(key.sequence) + " of admission " +
                  std::to_string(key.admission) + ": " + what);
}

bool is_member(const Event& event, const PeerId& peer) {
  return std::find(event.members.begin(), event.members.end(), peer) != event.members.end();
}

}  // namespace

void Ledger::add(const Event& event) {
  newest_ = std::max(newest_, event.key.admission);
  if (event.kind == Event::Kind::out) return ended(event.self, event.key);
  const auto [it, fresh] = operations_.try_emplace(event.key, Operation{event, {}});
  it->second.heard.insert(event.self);
  latest_[event.self] = event.key;
  if (fresh) return;
  const Event& first = it->second.first;
  const bool same =
      event.kind == first.kind && (event.kind == Event::Kind::failed ||
                                   (event.epoch == first.epoch && event.members == first.members));
  if (!same) violation(event.key, describe(first) + ", but " + describe(event));
  if (event.digest != first.digest)
    violation(event.key, describe(first) + ", " + event.self.brief() + " has other bytes");
}

void Ledger::ended(const PeerId& peer, const std::optional<Key>& inside) {
  ended_.try_emplace(peer, inside);
}

// Whether all members have reported the operation's end, or have ended in it. An evicted member may
// learn of its eviction late.
bool Ledger::complete(const Key& key, const Operation& operation) const {
  const Event& first = operation.first;
  bool all = true;
  for (std::size_t i = 0; i < first.world; ++i) {
    const PeerId& member = first.members.at(i);
    if (operation.heard.contains(member)) continue;
    const auto end = ended_.find(member);
    const auto latest = latest_.find(member);
    const bool gone_on = latest != latest_.end() && latest->second > key;
    if (gone_on || (end != ended_.end() && end->second != key))
      violation(key, describe(first) + ", " + member.brief() + " has not");
    all = all && end != ended_.end();
  }
  return all;
}

void Ledger::settle(std::uint64_t admission) {
  for (auto it = operations_.begin(); it != operations_.end();) {
    const auto& [key, operation] = *it;
    if (key.admission >= admission) break;
    if (!complete(key, operation)) {
      ++it;
      continue;
    }
    const Event& first = operation.first;
    const bool committed = first.kind == Event::Kind::committed;
    if (const auto hit = hit_.find(key); hit != hit_.end()) {
      for (const PeerId& peer : hit->second) {
        ++(!committed               ? totals_.hit_failed
           : is_member(first, peer) ? totals_.hit_with
                                    : totals_.hit_without);
      }
      hit_.erase(hit);
    }
    ++(committed ? totals_.committed : totals_.failed);
    totals_.rerun += first.attempts > 1 ? 1 : 0;
    totals_.counted += first.counted ? 1 : 0;
    totals_.in_memory += first.counted && first.in_memory ? 1 : 0;
    it = operations_.erase(it);
  }
}

void Ledger::close() {
  settle(~std::uint64_t{0});
  if (operations_.empty()) return;
  const auto& [key, operation] = *operations_.begin();
  violation(key, describe(operation.first) + ", not all have");
}

}  // namespace pccl::stress
