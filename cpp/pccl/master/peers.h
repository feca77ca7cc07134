// The members and the newcomers of a group.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/master/limits.h"
#include "pccl/master/returned.h"
#include "pccl/wire/messages.h"

namespace pccl::master {

// Rates are those between two heartbeats that are at least this far apart.
inline constexpr Duration kRateWindow = std::chrono::seconds(1);

struct Peer {
  wire::Member member;
  ConnectionId connection = 0;  // 0: its control connection is gone
  Instant heard{};
  std::string seen;  // its address as the master sees it
  std::string software;
  wire::Heartbeats heartbeats;  // of its Join; of a member that returned from another master: any
  Instant since{};  // when it joined; of a member when it was admitted, or returned to this master
  Budget budget;

  // -- newcomers
  std::uint32_t order = 0xffffffff;
  bool waiting = false;  // for admission
  bool start_only = false;
  std::uint64_t prepared_epoch = 0;
  std::set<PeerId> unreachable;  // members that it cannot reach, by its own report
  wire::Measurements row;        // of its connections to members, until its first epoch

  // -- shared memory
  std::set<PeerId> shares_with;
  std::uint32_t sharing_pending = 0;  // peers with which it may still come to share

  // -- members
  Instant disconnected_at{};
  std::uint64_t applied = 0;             // ordinal of the last log entry that it has applied
  wire::Blocked blocked;                 // its latest report about its threads
  std::uint64_t blocked_at_ordinal = 0;  // `applied` at that report
  bool returned = true;                  // false: it has not returned to this restarted master
  std::map<wire::CallKey, Instant> waits_since;  // for calls in `blocked`

  // -- work, as its heartbeats report
  wire::WorkDone totals;
  wire::WorkDone recent;   // added within `recent_time`, which ended with a heartbeat
  Duration recent_time{};  // 0: not known yet; else at least kRateWindow
  bool draining = false;   // it will leave at its next admission point
  wire::Patience patience;

  void on_heartbeat(const wire::Heartbeat& heartbeat, Instant now);
  void on_blocked(const wire::Blocked& report, std::uint64_t ordinal, Instant now);

 private:
  std::optional<Instant> base_at_;
  wire::WorkDone base_;  // at that time
};

// A member to remove. `reason`: for the member, the others and the log.
struct Departed {
  PeerId id;
  Code code = Code::evicted;
  std::string reason;
  bool finished = false;  // it left regularly
};

// *one thread: the master's*
struct Peers {
  std::vector<Peer> members;            // in rank order
  std::vector<Peer> candidates;         // in order of joining
  std::uint32_t ranks_per_replica = 0;  // as the peers report; 0: no replicas

  [[nodiscard]] Peer* member(const PeerId& id);
  [[nodiscard]] const Peer* member(const PeerId& id) const {
    return const_cast<Peers*>(this)->member(id);
  }
  [[nodiscard]] Peer* on(ConnectionId connection);
  [[nodiscard]] bool is_member(const Peer& peer) const { return member(peer.member.id) == &peer; }
  // members.size() if the peer is not a member.
  [[nodiscard]] std::size_t rank_of(const PeerId& id) const;
  [[nodiscard]] std::vector<PeerId> ids() const;  // of members, in rank order
  [[nodiscard]] bool empty() const { return members.empty() && candidates.empty(); }
  // As wire::shown_name, among members and newcomers.
  [[nodiscard]] std::string shown(const PeerId& id) const;
  // "rank 2 (trainer-3)", or "peer trainer-3" if the peer is not a member.
  [[nodiscard]] std::string named(const PeerId& id) const;
  void drop_candidate(ConnectionId connection) {
    std::erase_if(candidates, [&](const Peer& peer) { return peer.connection == connection; });
  }
  // Removes a newcomer from the list and returns it. It will apply log entries after
  // `last_ordinal`.
  [[nodiscard]] Peer take_candidate(std::size_t at, std::uint64_t last_ordinal);
  // Whether the member may be gone: it is not connected, or was silent for two heartbeat intervals.
  // True if the peer is not a member.
  [[nodiscard]] bool silent(const PeerId& id, const Options& options, Instant now) const;
  // Whether all members are connected and know with which peers they share memory.
  [[nodiscard]] bool sharing_settled() const {
    return std::ranges::all_of(members, [](const Peer& peer) {
      return peer.sharing_pending == 0 && peer.connection != 0;
    });
  }
};

}  // namespace pccl::master
