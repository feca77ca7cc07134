// One group: decides its epochs and the verdicts of its calls. Its facts are in five tables: Peers,
// DecisionLog, OpenCalls, LinkHealth and Planning. Pure: events in, messages out, no clock, no
// sockets.
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
//                           | clearly faster: epoch (plan)
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
#include <optional>
#include <string>
#include <vector>

#include "pccl/master/decision_log.h"
#include "pccl/master/judgements.h"
#include "pccl/master/link_health.h"
#include "pccl/master/open_calls.h"
#include "pccl/master/peers.h"
#include "pccl/master/planning.h"
#include "pccl/master/returned.h"

namespace pccl::master {

// Events and questions of a group about replicas: see replicas.h. By default there are none.
class ReplicaRules {
 public:
  virtual ~ReplicaRules() = default;
  // An event may let admissions or the start proceed.
  virtual void changed() {}
  // A member or a newcomer has left or was removed. `finished`: a member left regularly.
  virtual void departed(std::uint32_t /*group*/, const wire::Member&, const std::string& /*reason*/,
                        bool /*member*/, bool /*finished*/) {}
  // A newcomer has lost its connection or withdrawn.
  virtual void away(std::uint32_t /*group*/, const wire::Member&, const std::string& /*reason*/) {}
  // All members of the group are at this admission point. Returns the replicas to admit there.
  // Empty optional: not decided, or not ready yet; Group::retry_admission follows.
  virtual std::optional<std::vector<std::string>> to_admit(std::uint32_t /*group*/,
                                                           std::uint64_t /*point*/) {
    return std::nullopt;
  }
  // Whether replicas would be admitted at this point.
  [[nodiscard]] virtual bool wait(std::uint32_t /*group*/, std::uint64_t /*point*/) const {
    return false;
  }
  // Whether replicas have members, in any group.
  [[nodiscard]] virtual bool started() const { return false; }
  // The number of replicas that must still join before the start.
  [[nodiscard]] virtual std::uint32_t missing() const { return 0; }
};

// The interface of a group to its master.
class Surroundings {
 public:
  virtual ~Surroundings() = default;
  virtual void send(ConnectionId to, std::uint64_t collected, const wire::Message& message) = 0;
  virtual void close(ConnectionId connection) = 0;
  virtual void log(std::string line) = 0;
  virtual wire::Census census() = 0;
  virtual std::uint64_t next_join_ordinal() = 0;

  // Begins to relay a connection between two peers. Returns a token for each.
  virtual std::optional<std::pair<PeerId, PeerId>> expect_relay(const PeerId& /*one*/,
                                                                const PeerId& /*other*/) {
    return std::nullopt;
  }
  virtual void end_relay(const PeerId& /*one*/, const PeerId& /*other*/) {}
  virtual ReplicaRules& replicas() {
    static ReplicaRules none;
    return none;
  }
};

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

  void add_candidate(ConnectionId connection, const wire::Join& join, const std::string& seen,
                     Instant now);
  // A member has a new control connection. `log`: its answer to RequestLog, or null.
  enum class Return : std::uint8_t {
    in,
    out,        // it is no longer a member
    needs_log,  // it knows decisions that this master lacks: call again with its log
  };
  Return rejoin(ConnectionId connection, const wire::Rejoin& rejoin,
                const std::vector<wire::LogEntry>* log, Instant now);
  void on_message(ConnectionId from, const wire::Frame& frame, Instant now);
  void on_disconnect(ConnectionId connection, Instant now);
  void on_time(Instant now);
  // Removes a peer that broke the rules. `reason`: for the peer and the log.
  void evict(ConnectionId connection, Code code, const std::string& reason, Instant now);

  // -- replicas
  // 0: the group's peers belong to no replicas.
  [[nodiscard]] std::uint32_t ranks_per_replica() const { return empty() ? 0 : ranks_; }
  [[nodiscard]] std::vector<RankStanding> ranks() const;
  // Whether the member is in a call with others.
  [[nodiscard]] bool busy(const PeerId& id) const;
  // `points`: the number of admission points passed before. REQUIRES: no members; a waiting
  // newcomer of each replica.
  void start_with(const std::vector<std::string>& replicas, std::uint64_t points);
  // Newcomers that only wanted to found the group stop waiting: it has started without them.
  void leave_behind();
  void retry_admission(Instant now);
  // Evicts the replica's rank in this group: the member, and the newcomers.
  void evict_rank(const std::string& replica, bool member, bool newcomers,
                  const std::string& reason, Instant now);
  // Sends a line for the user's log.
  void tell_rank(const std::string& replica, const std::string& text);

  // Asks up to `most` members that `fit` whether they can connect to an address. Returns those
  // asked.
  [[nodiscard]] std::vector<PeerId> ask_members(const wire::Try& question, std::size_t most,
                                                const std::function<bool(ConnectionId)>& fit);
  [[nodiscard]] PeerId member_on(ConnectionId connection) const;
  [[nodiscard]] bool knows(ConnectionId connection) const;
  [[nodiscard]] const wire::EpochRecord& record() const { return record_; }
  [[nodiscard]] const DecisionLog& log() const { return log_; }
  [[nodiscard]] bool empty() const { return peers_.empty(); }
  // Whether a decision may become due within some hundred milliseconds.
  [[nodiscard]] bool hurried() const {
    return links_.troubled() || stuck_since_ || calls_.disagree();
  }
  // The open calls with the members that entered and those that are done: for tests of rebuild().
  [[nodiscard]] std::string summary() const;
  [[nodiscard]] const OpenCalls& calls() const { return calls_; }

 private:
  struct Departed {
    PeerId id;
    Code code = Code::evicted;
    std::string reason;
    bool finished = false;  // it left regularly
  };

  // -- decisions
  void append(DecisionLog::Decision what);
  void decide(const wire::CallKey& key, Code code, const PeerId& culprit, const std::string& reason,
              const std::string& waiting, const wire::SyncDecision& sync = {});
  void begin_epoch(wire::Cause cause, std::vector<wire::Departure> departures,
                   std::vector<wire::OpKey> aborted);
  void start_over(wire::Cause cause, std::vector<wire::Departure> departures,
                  std::vector<wire::OpKey> aborted);
  void collect_log();
  void send_log(const Peer& to, std::uint64_t after);

  // -- newcomers
  bool let_in_again(ConnectionId connection, const wire::Join& join, const PeerId& seal,
                    Instant now);
  [[nodiscard]] std::optional<std::string> refusal_of(const wire::Join& join,
                                                      const PeerId& seal) const;
  void tell_namesake(ConnectionId connection);
  void tell_lone_founder(Instant now);
  [[nodiscard]] std::uint32_t missing() const;
  void start_if_ready(Instant now);
  void start(std::vector<Peer> founders);
  [[nodiscard]] bool newcomer_ready(const Peer& candidate) const;
  [[nodiscard]] bool newcomers_ready() const;
  [[nodiscard]] bool fits(const Peer& candidate) const;
  [[nodiscard]] wire::Expect expected() const;
  void tell_newcomers();
  void let_newcomers_in(wire::RoundKind kind, const std::vector<std::string>& replicas);

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
  bool adopt(const std::vector<wire::LogEntry>& log, std::uint64_t applied);

  // -- messages of one peer. The peer may be evicted, which invalidates `from`.
  void hear_newcomer(Peer& from, const wire::Message& message, Instant now);
  void hear_member(Peer& from, const wire::Message& message, std::uint64_t applied, Instant now);
  void on_neighbourhood(Peer& from, const wire::Neighbourhood& neighbourhood, Instant now);
  void on_prepared(Peer& from, const wire::Prepared& prepared, Instant now);
  void on_abort(Peer& from, const wire::AbortRequest& request, std::uint64_t applied, Instant now);
  void on_newcomers_link(Peer& from, const wire::LinkReport& report, Instant now);
  void on_link(Peer& from, const wire::LinkReport& report, Instant now);
  void on_want_relay(Peer& from, const wire::WantRelay& want, Instant now);
  void on_operation(Peer& from, const wire::OpState& state, std::uint64_t applied, Instant now);
  void on_round(Peer& from, const wire::RoundEntry& entry, std::uint64_t applied, Instant now);

  // -- calls
  void check_operation(const wire::OpKey& key, Instant now);
  void check_round(const wire::RoundKey& key, Instant now);
  void check_sync(const wire::RoundKey& key, Instant now);
  void check_calls(Instant now);
  void check_stuck(Instant now);
  void notice_stragglers(Instant now);
  void end_overdue(Instant now);
  void optimize(const wire::RoundKey& key);
  [[nodiscard]] bool measure_at(const wire::RoundKey& key);

  // -- plans and links
  bool plan_epoch();
  void take_plan(Draft draft);
  void check_plan(Instant now);
  void reconsider_plan(Instant now);
  [[nodiscard]] std::set<Pair> relayed_pairs() const;
  [[nodiscard]] bool silent(const PeerId& id, Instant now) const;
  void check_links(Instant now);
  [[nodiscard]] bool plan_around(const std::vector<BadLink>& bad);
  void evict_for_links(const std::vector<BadLink>& bad, std::vector<BadLink> overdue, Instant now);
  void reset_links();
  void note(const std::string& line) { around_.log("group " + std::to_string(id_) + ": " + line); }

  std::uint32_t id_;
  std::uint32_t ranks_ = 0;  // per replica, as the group's peers report; 0: no replicas
  Options options_;
  Surroundings& around_;
  wire::EpochRecord record_;
  Peers peers_;
  DecisionLog log_;
  OpenCalls calls_{options_.limits};
  LinkHealth links_;
  Planning planning_{options_, peers_, links_};
  std::optional<Instant> stuck_since_;
  std::optional<Instant> alone_since_;  // set until a lone founder is notified
  std::optional<Instant> others_at_;    // when a peer last departed
  Instant last_tick_{};
};

}  // namespace pccl::master
