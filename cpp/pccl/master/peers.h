// The members of a group and its newcomers, with what the master knows of each.
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/master/limits.h"
#include "pccl/master/returned.h"
#include "pccl/wire/messages.h"

namespace pccl::master {

struct Peer {
  wire::Member member;
  ConnectionId connection = 0;  // 0: its control connection is gone
  Instant heard{};
  std::string seen;  // the address at which the master sees it
  Budget budget;

  // a newcomer
  std::uint32_t min_peers = 1;
  std::uint32_t order = 0xffffffff;
  bool waiting = false;  // to be let in
  bool start_only = false;
  std::uint64_t prepared_epoch = 0;
  std::set<PeerId> unreachable;  // members that it cannot reach, as it says

  // memory of its host
  std::set<PeerId> shares_with;
  std::uint32_t sharing_pending = 0;  // peers of which it does not know yet

  // a member
  Instant disconnected_at{};
  std::uint64_t applied = 0;             // the last entry of the log that it has applied
  wire::Blocked blocked;                 // its threads
  std::uint64_t blocked_at_ordinal = 0;  // `applied` when it reported that
  bool returned = true;                  // false: it has not come back to this restarted master
};

// *one thread: the master's*
struct Peers {
  std::vector<Peer> members;     // in rank order
  std::vector<Peer> candidates;  // in order of joining

  [[nodiscard]] Peer* member(const PeerId& id);
  [[nodiscard]] const Peer* member(const PeerId& id) const {
    return const_cast<Peers*>(this)->member(id);
  }
  [[nodiscard]] Peer* on(ConnectionId connection);
  [[nodiscard]] bool is_member(const Peer& peer) const { return member(peer.member.id) == &peer; }
  // members.size(): it is none.
  [[nodiscard]] std::size_t rank_of(const PeerId& id) const;
  [[nodiscard]] std::vector<PeerId> ids() const;  // of the members, in rank order
  [[nodiscard]] bool empty() const { return members.empty() && candidates.empty(); }
  // "rank 2 (1a2b3c4d)", or "peer 1a2b3c4d" of a peer that is no member.
  [[nodiscard]] std::string named(const PeerId& id) const;
  void drop_candidate(ConnectionId connection) {
    std::erase_if(candidates, [&](const Peer& peer) { return peer.connection == connection; });
  }
  // Takes a newcomer out of the list; it applies the log from `last_ordinal` on.
  [[nodiscard]] Peer take_candidate(std::size_t at, std::uint64_t last_ordinal);
  // All members know with whom they share memory, and can say so.
  [[nodiscard]] bool sharing_settled() const {
    return std::all_of(members.begin(), members.end(), [](const Peer& peer) {
      return peer.sharing_pending == 0 && peer.connection != 0;
    });
  }
};

}  // namespace pccl::master
