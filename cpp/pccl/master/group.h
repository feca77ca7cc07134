// One group: decides its epochs and the verdicts of its calls. Its facts are in five tables: Peers,
// DecisionLog, OpenCalls, LinkHealth and Planning. Pure: events in, messages out, no clock, no
// sockets. Its parts are layers; each uses the tables and the parts before it:
//
//   Newcomers              which peers may become members
//   Decisions              makes the entries of the log
//   CallRules, LinkRules   when calls end, and what follows from links that do not work
//   Group                  routes messages, and removes members
//
// clang-format off
//   event                   | consequences
//   ------------------------+---------------------------------------------------------------------
//   add_candidate, asks     | not started and min_peers reached: epoch (admission);
//                           | otherwise Prepare, Expect
//   prepared                | the newcomer may enter at the next admission round
//   enters a round          | all members in: outcome, or epoch (admission) if newcomers are ready
//                           | (with replicas: when replicas.h says so); before the outcome of
//                           | optimize_topology an epoch (plan) if rates are new
//   operation entered, done | signatures differ: verdict mismatch; all done: verdict commit
//   abort request           | unless decided already: verdict timeout, or peer_lost (interrupted)
//   link report             | the peer's control connection is gone too: loss; otherwise link reset
//                           | (epoch, loss), a plan without the link, or eviction
//   control connection gone | its link was reported: loss; otherwise loss after the reconnect time
//   blocked report          | no member can proceed: verdict deadlock for every call with waiters
//   memory sharing changed  | epoch (plan): operations start over, none ends
//   operation took long     | links were never measured: the outcome of the next admission point
//                           | asks members to measure
//   measured                | at most every replan_interval, between operations, if another plan is
//                           | clearly faster: epoch (plan). Once at once, when the delays of all
//                           | pairs of hosts are known
//   a relay is wanted       | between members that could not connect: tokens to both
//   leave, silence, misuse  | loss
//   loss                    | epoch (loss): operations that do not run again end, the others lose
//                           | their `done`; rounds continue
// clang-format on
//
// Every decision is an entry of the log, which all members see in the same order.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pccl/master/call_rules.h"
#include "pccl/master/decision_log.h"
#include "pccl/master/decisions.h"
#include "pccl/master/link_health.h"
#include "pccl/master/link_rules.h"
#include "pccl/master/newcomers.h"
#include "pccl/master/open_calls.h"
#include "pccl/master/peers.h"
#include "pccl/master/planning.h"
#include "pccl/master/returned.h"
#include "pccl/master/surroundings.h"
#include "pccl/wire/status.h"

namespace pccl::master {

// The state of one rank of a replica in its group.
struct RankStanding {
  wire::Member peer;
  std::uint32_t min_peers = 1;
  bool member = false;
  bool waiting = false;  // a newcomer that waits for admission
  bool ready = false;    // a newcomer that can be admitted now
};

// *one thread: the master's*
class Group {
 public:
  Group(std::uint32_t id, const Options& options, Surroundings& around)
      : id_(id), options_(options), around_(around) {}
  Group(const Group&) = delete;  // the tables refer to each other
  Group& operator=(const Group&) = delete;

  // Rebuilds a group from its members' reports. `log`: the log of newest(reports). REQUIRES:
  // reports is not empty.
  static std::unique_ptr<Group> rebuild(std::uint32_t id, const Options& options,
                                        Surroundings& around, const std::vector<Returned>& reports,
                                        const std::vector<wire::LogEntry>& log, Instant now);

  // The same, from `base`: the record and the last ordinal of `log`.
  static std::unique_ptr<Group> rebuild(std::uint32_t id, const Options& options,
                                        Surroundings& around, const wire::Rejoin& base,
                                        const std::vector<Returned>& reports,
                                        const std::vector<wire::LogEntry>& log, Instant now);
  // The term of the master that has rebuilt it. Members that have followed a lower one may have
  // decisions of the master before that are not in this log.
  void rebuilt_in(std::uint32_t term) { rebuilt_in_ = term; }
  // Begins the term of a master that has taken over from another one.
  void begin_term() { decisions_.begin_term(); }

  void add_candidate(ConnectionId connection, const wire::Join& join, const std::string& seen,
                     Instant now);
  // A member has a new control connection. `term`: the one that it has followed. `log`: its answer
  // to RequestLog, or null.
  enum class Return : std::uint8_t {
    in,
    out,        // it is no longer a member
    needs_log,  // it knows decisions that this master lacks: call again with its log
  };
  Return rejoin(ConnectionId connection, const wire::Rejoin& rejoin, std::uint32_t term,
                const std::vector<wire::LogEntry>* log, Instant now);
  void on_message(ConnectionId from, const wire::Frame& frame, Instant now);
  void on_disconnect(ConnectionId connection, Instant now);
  void on_time(Instant now);
  // Removes a peer that broke the rules. `reason`: for the peer and the log.
  void evict(ConnectionId connection, Code code, const std::string& reason, Instant now);

  // -- replicas
  // 0: the group's peers belong to no replicas.
  [[nodiscard]] std::uint32_t ranks_per_replica() const {
    return empty() ? 0 : peers_.ranks_per_replica;
  }
  [[nodiscard]] std::vector<RankStanding> ranks() const;
  // Whether the member is in a call with others.
  [[nodiscard]] bool busy(const PeerId& id) const;
  // `points`: the number of admission points passed before. REQUIRES: no members; a waiting
  // newcomer of each replica.
  void start_with(const std::vector<std::string>& replicas, std::uint64_t points);
  void leave_behind() { newcomers_.leave_behind(); }
  void retry_admission(Instant now);
  // Evicts the replica's rank in this group: the member, and the newcomers.
  void evict_rank(const std::string& replica, bool member, bool newcomers,
                  const std::string& reason, Instant now);
  void tell_rank(const std::string& replica, const std::string& text) {
    newcomers_.tell(replica, text);
  }

  // Asks up to `most` members that `fit` whether they can connect to an address. Returns those
  // asked.
  [[nodiscard]] std::vector<PeerId> ask_members(const wire::Try& question, std::size_t most,
                                                const std::function<bool(ConnectionId)>& fit);
  [[nodiscard]] PeerId member_on(ConnectionId connection) const;
  [[nodiscard]] bool knows(ConnectionId connection) const;
  [[nodiscard]] bool has(const PeerId& peer) const;  // as a member, or as a newcomer
  [[nodiscard]] const wire::EpochRecord& record() const { return record_; }
  [[nodiscard]] const DecisionLog& log() const { return log_; }
  [[nodiscard]] bool empty() const { return peers_.empty(); }
  // Whether a decision may become due within some hundred milliseconds.
  [[nodiscard]] bool hurried() const { return links_.troubled() || calls_.doubtful(); }
  // The open calls with the members that entered and those that are done: for tests of rebuild().
  [[nodiscard]] std::string summary() const;
  [[nodiscard]] const OpenCalls& calls() const { return calls_; }

  // -- operators
  [[nodiscard]] wire::GroupStatus status(Instant now) const;
  // Peers with this name, or this id (32 digits, or the first 8), and what messages call them.
  [[nodiscard]] std::vector<std::pair<PeerId, std::string>> find(const std::string& name) const;
  // Removes the peer, a member or a newcomer.
  void kick(const PeerId& id, Instant now);
  // Asks the peer to leave. False: it has no control connection now.
  [[nodiscard]] bool drain(const PeerId& id);
  void admission_changed(Instant now);
  // Members that were removed, or lost.
  [[nodiscard]] std::uint64_t evictions() const { return evictions_; }

 private:
  // -- newcomers
  bool let_in_again(ConnectionId connection, const wire::Join& join, const Seal& seal, Instant now);
  void start_if_ready(Instant now);

  // -- departures
  void remove(const std::vector<Departed>& departed, Instant now);
  void evict_busiest(Instant now) {
    remove({{calls_.busiest(), Code::evicted, "protocol misuse: it has too many calls open"}}, now);
  }
  void evict_laggards(Instant now);
  void evict_silent(Instant now);
  bool misuse(const Peer& from, const std::string& what, Instant now);
  bool stray(Peer& from, const char* what, Instant now);
  bool floods(Peer& from, std::size_t items, Instant now);

  // -- messages of one peer. The peer may be evicted, which invalidates `from`.
  void hear_newcomer(Peer& from, const wire::Message& message, Instant now);
  void hear_member(Peer& from, const wire::Message& message, std::uint64_t applied, Instant now);
  void on_heartbeat(Peer& from, const wire::Heartbeat& heartbeat, Instant now);
  void on_neighbourhood(Peer& from, const wire::Neighbourhood& neighbourhood, Instant now);
  void on_abort(Peer& from, const wire::AbortRequest& request, std::uint64_t applied, Instant now);
  void on_newcomers_link(Peer& from, const wire::LinkReport& report, Instant now);
  void on_link(Peer& from, const wire::LinkReport& report, Instant now);
  void on_want_relay(Peer& from, const wire::WantRelay& want, Instant now);
  void on_operation(Peer& from, const wire::OpState& state, std::uint64_t applied, Instant now);
  void on_round(Peer& from, const wire::RoundEntry& entry, std::uint64_t applied, Instant now);

  // -- calls and links
  void check_call(const wire::CallKey& key, Instant now) {
    remove(call_rules_.check(key, now), now);
  }
  void check_calls(Instant now);
  void check_links(Instant now) { remove(link_rules_.check(now), now); }

  std::uint32_t id_;
  Options options_;
  Surroundings& around_;
  std::uint32_t rebuilt_in_ = 0;
  wire::EpochRecord record_;
  GroupContext context_{id_, options_, around_, record_};
  Peers peers_;
  DecisionLog log_;
  OpenCalls calls_{options_.limits};
  LinkHealth links_;
  Planning planning_{options_, peers_, links_};
  Newcomers newcomers_{context_, record_, peers_, log_, links_, planning_};
  Decisions decisions_{context_, record_, peers_, log_, calls_, links_, planning_, newcomers_};
  CallRules call_rules_{context_, record_, peers_, log_, calls_, planning_, newcomers_, decisions_};
  LinkRules link_rules_{context_, record_, peers_, links_, planning_, decisions_};
  Instant last_tick_{};
  std::uint64_t operations_ = 0;  // committed, by the reports of the oldest members
  std::uint64_t evictions_ = 0;
};

}  // namespace pccl::master
