#include "pccl/master/peers.h"

#include <utility>

namespace pccl::master {
namespace {

// The increase. A peer may report anything.
std::uint64_t added(std::uint64_t before, std::uint64_t after) {
  return after > before ? after - before : 0;
}

wire::WorkDone added(const wire::WorkDone& before, const wire::WorkDone& after) {
  return {added(before.operations, after.operations),
          added(before.reduced_bytes, after.reduced_bytes),
          added(before.sent_bytes, after.sent_bytes),
          added(before.received_bytes, after.received_bytes)};
}

}  // namespace

void Peer::on_heartbeat(const wire::Heartbeat& heartbeat, Instant now) {
  totals = heartbeat.totals;
  draining = heartbeat.draining;
  patience = heartbeat.patience;
  if (base_at_ && now - *base_at_ < kRateWindow) return;
  if (base_at_) {
    recent = added(base_, totals);
    recent_time = now - *base_at_;
  }
  base_ = totals;
  base_at_ = now;
}

void Peer::on_blocked(const wire::Blocked& report, std::uint64_t ordinal, Instant now) {
  blocked = report;
  blocked_at_ordinal = ordinal;
  std::map<wire::CallKey, Instant> before = std::exchange(waits_since, {});
  for (const wire::CallKey& call : report.waits) {
    const auto known = before.find(call);
    waits_since.emplace(call, known == before.end() ? now - wire::Blocked::kAfter : known->second);
  }
}

Peer* Peers::member(const PeerId& id) {
  const auto it =
      std::ranges::find_if(members, [&](const Peer& peer) { return peer.member.id == id; });
  return it == members.end() ? nullptr : &*it;
}

Peer* Peers::on(ConnectionId connection) {
  for (auto* list : {&members, &candidates}) {
    for (Peer& peer : *list) {
      if (peer.connection == connection) return &peer;
    }
  }
  return nullptr;
}

std::size_t Peers::rank_of(const PeerId& id) const {
  std::size_t rank = 0;
  while (rank < members.size() && members[rank].member.id != id) ++rank;
  return rank;
}

std::vector<PeerId> Peers::ids() const {
  std::vector<PeerId> ids;
  for (const Peer& peer : members) ids.push_back(peer.member.id);
  return ids;
}

std::string Peers::shown(const PeerId& id) const {
  const Peer* found = nullptr;
  for (const auto* list : {&members, &candidates}) {
    for (const Peer& peer : *list) {
      if (peer.member.id == id) found = &peer;
    }
  }
  if (found == nullptr) return id.brief();
  std::size_t same = 0;
  for (const auto* list : {&members, &candidates}) {
    for (const Peer& peer : *list) {
      if (peer.member.name == found->member.name) ++same;
    }
  }
  return wire::shown_name(found->member.name, id, same == 1);
}

std::string Peers::named(const PeerId& id) const {
  const std::size_t rank = rank_of(id);
  if (rank >= members.size()) return "peer " + shown(id);
  return "rank " + std::to_string(rank) + " (" + shown(id) + ")";
}

Peer Peers::take_candidate(std::size_t at, std::uint64_t last_ordinal) {
  Peer peer = std::move(candidates[at]);
  candidates.erase(candidates.begin() + static_cast<std::ptrdiff_t>(at));
  peer.applied = last_ordinal;
  return peer;
}

bool Peers::silent(const PeerId& id, const Options& options, Instant now) const {
  const Peer* peer = member(id);
  return peer == nullptr || peer->connection == 0 ||
         now - peer->heard >= 2 * options.heartbeat_interval;
}

}  // namespace pccl::master
