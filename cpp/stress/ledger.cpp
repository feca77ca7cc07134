#include "stress/ledger.h"

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

void Ledger::settle(std::uint64_t admission) {
  while (!operations_.empty() && operations_.begin()->first.admission < admission) {
    const auto& [key, operation] = *operations_.begin();
    const Event& first = operation.first;
    const bool committed = first.kind == Event::Kind::committed;
    for (std::size_t i = 0; i < first.world; ++i) {
      const PeerId& member = first.members.at(i);
      if (operation.heard.contains(member)) continue;
      const auto end = ended_.find(member);
      if (end == ended_.end() || end->second != key)
        violation(key, describe(first) + ", " + member.brief() + " has not");
    }
    if (const auto hit = hit_.find(key); hit != hit_.end()) {
      for (const PeerId& peer : hit->second) {
        ++(!committed ? cuts_.given_up : is_member(first, peer) ? cuts_.with : cuts_.without);
      }
    }
    ++(committed ? committed_ : failed_);
    if (first.attempts > 1) ++rerun_;
    operations_.erase(operations_.begin());
  }
  hit_.erase(hit_.begin(), hit_.lower_bound(Key{admission, 0}));
}

}  // namespace pccl::stress
