#include "pccl/master/peers.h"

namespace pccl::master {

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

std::string Peers::named(const PeerId& id) const {
  const std::size_t rank = rank_of(id);
  if (rank >= members.size()) return "peer " + id.brief();
  return "rank " + std::to_string(rank) + " (" + id.brief() + ")";
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
