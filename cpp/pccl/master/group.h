// One group's membership, log, open calls and their verdicts. Pure: events in, messages out, no
// clock and no sockets.
//
// clang-format off
//   event                   | what may follow
//   ------------------------+-------------------------------------------------------------------------------------
//   add_candidate, asks     | group not started and min_peers reached: epoch (admission); else Prepare, Expect
//   prepared                | the newcomer may enter at the next admit round
//   enters a round          | all members in: outcome, or epoch (admission) when newcomers are ready (of replicas:
//                           | when replicas.h says so); before the outcome of optimize_topology an epoch (plan), when
//                           | somebody measured something new
//   operation entered, done | signatures differ: verdict mismatch; all done: verdict commit
//   abort request           | verdict timeout or peer_lost (interrupted), unless decided already
//   link report             | the peer's control is gone too: loss; else link reset (epoch, loss), a plan without the
//                           | link, or eviction
//   control connection gone | a bad link to the peer was reported: loss; else loss when the reconnect window is over
//   blocked report          | nobody can move: verdict deadlock for every call that is waited in
//   who shares memory       | epoch (plan): operations start over, none ends
//   operation took long     | links were never measured: the next admission point's outcome asks members to
//   measured                | at most every replan_interval, between operations, if another plan is clearly faster:
//                           | epoch (plan)
//   a relay is wanted       | of members that could not connect: tokens for a connection through the master, to both
//   leave, silence, misuse  | loss
//   loss                    | epoch (loss): policy-abort operations end, the others lose their `done`; rounds go on
// clang-format on
//
// Every decision is an entry of the log, which all members see in the same order.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pccl/base/allowance.h"
#include "pccl/base/error.h"
#include "pccl/base/ids.h"
#include "pccl/master/decisions.h"
#include "pccl/master/returned.h"
#include "pccl/topology/choose.h"
#include "pccl/topology/plan.h"
#include "pccl/wire/messages.h"

namespace pccl::master {

struct Options {
  std::uint32_t min_peers = 1;  // a group starts with so many at least, whatever its peers ask for
  Duration heartbeat_interval = std::chrono::seconds(1);
  Duration heartbeat_timeout = std::chrono::seconds(6);
  Duration reconnect_timeout = std::chrono::seconds(10);
  Duration handshake_timeout = std::chrono::seconds(5);
  Duration broken_link_grace =
      std::chrono::milliseconds(300);  // a killed peer's control connection breaks within it
  Duration mismatch_grace =
      std::chrono::milliseconds(500);  // wait for more signatures before naming the odd one
  Duration several_threads_grace =
      std::chrono::seconds(10);  // stuck, but a member has several threads
  Duration straggler_notice = std::chrono::seconds(10);
  Duration straggler_repeat = std::chrono::minutes(1);  // of the notice
  // A member that most others have waited for so long is evicted; a call that most members have not
  // made ends. None: never.
  std::optional<Duration> straggler_timeout = std::chrono::minutes(30);
  Duration replan_interval = std::chrono::seconds(30);  // for what transfers have shown
  Duration measure_after = std::chrono::seconds(1);     // of an operation; zero: never
  std::uint32_t segment_bytes = 512 << 10;
  topology::Thresholds thresholds;
  std::size_t max_open_calls = 1 << 16;                   // per group
  std::uint64_t max_open_bytes = std::uint64_t{4} << 30;  // per group: of lists of entries
  std::size_t max_peers = 4096;                           // per group
  // What one peer may tell us of itself. Every epoch has all members' addresses, and must fit into
  // a message (wire::kMaxPayload).
  std::size_t max_addresses = 64;
  std::size_t max_address_bytes = 2048;  // of all its host names
  std::size_t max_waits = 1024;          // calls that its threads wait in
  // While more operations than these are open, only so much is kept of each sentence that describes
  // one.
  std::size_t many_open_calls = 4096;
  std::size_t short_text = 128;
  // Entries of the log that a member may be behind: all others keep them for it. A member says with
  // every heartbeat how far it is, and calls of which it has not heard end without it only so often
  // (`aborts`).
  std::size_t max_behind = 1 << 18;
  // What a peer may cause, at once and per second after that. An honest one does each of these a
  // few times when something breaks; beyond that it is evicted.
  Rate strays{1024, 16};   // reports about peers that are no members, or of other admissions
  Rate aborts{65536, 64};  // calls that it has ended for all: as many as may be open
  Rate turns{1024, 16};    // as a newcomer: changes that all members are told of
  Rate restarts{64, 0.1};  // plans that it has undone: it does not share memory any more after all
  // What it says of itself and its links, and what it says again, in messages, or for long lists in
  // 16 of their items. After it has come back it may say again all that is open.
  Rate talk{1 << 17, 2048};
  // Of one pair of members, breaks of its link for which operations start over; with more the plan
  // goes without that link, if there is such a plan.
  Rate breaks{16, 0.1};
  // Where no plan does without links that cannot be made, the master relays: at most so many pairs
  // in each group, of up to so many connections that a member asks for.
  bool relays = false;
  std::size_t max_relayed = wire::kMaxRelayed;
  std::uint32_t max_relay_stripes = 8;  // at a time
  // Questions for them that are answered, of each member: it asks again (peer/engine_links.cpp asks
  // no more often than this).
  Rate wants{256, 8};
};

// What a group needs of the master around it.
class Surroundings {
 public:
  virtual ~Surroundings() = default;
  virtual void send(ConnectionId to, std::uint64_t collected, const wire::Message& message) = 0;
  virtual void close(ConnectionId connection) = 0;
  virtual void log(std::string line) = 0;
  virtual wire::Census census() = 0;
  virtual std::uint64_t next_join_ordinal() = 0;

  // A connection between these two is to go through the master: the tokens by which they are known.
  virtual std::optional<std::pair<PeerId, PeerId>> expect_relay(const PeerId& /*one*/,
                                                                const PeerId& /*other*/) {
    return std::nullopt;
  }
  // No more of theirs.
  virtual void end_relay(const PeerId& /*one*/, const PeerId& /*other*/) {}

  // -- of groups whose peers are ranks of replicas: see replicas.h
  // Something is another way that admissions or the start may have waited for.
  virtual void replicas_changed() {}
  // A member, or a newcomer, is out. `finished`: a member went by itself, in good order.
  virtual void rank_departed(std::uint32_t, const wire::Member&, const std::string& /*reason*/,
                             bool /*member*/, bool /*finished*/) {}
  // A newcomer's connection is gone, or it does not wait any more.
  virtual void rank_away(std::uint32_t, const wire::Member&, const std::string& /*reason*/) {}
  // All members stand at that admission point: the replicas that come in there. Nothing: not
  // decided, or not ready yet; Group::retry_admission follows.
  virtual std::optional<std::vector<std::string>> replicas_to_admit(std::uint32_t,
                                                                    std::uint64_t /*point*/) {
    return std::nullopt;
  }
  // Some would come in at that point.
  virtual bool replicas_wait(std::uint32_t, std::uint64_t /*point*/) { return false; }
  // Replicas have members, here or in another group.
  virtual bool replicas_started() { return false; }
  // Until then: replicas still to come.
  virtual std::uint32_t replicas_missing() { return 0; }
};

// Where one rank of a replica stands in its group.
struct RankStanding {
  wire::Member peer;
  std::uint32_t min_peers = 1;
  bool member = false;
  bool waiting = false;  // a newcomer that waits to be let in
  bool ready = false;    // ... and could be, now
};

// *one thread: the master's*
class Group {
 public:
  Group(std::uint32_t id, const Options& options, Surroundings& around)
      : id_(id), options_(options), around_(around) {}

  // The group as its members know it. `log`: of newest(reports). REQUIRES: reports is not empty.
  static Group rebuild(std::uint32_t id, const Options& options, Surroundings& around,
                       const std::vector<Returned>& reports, const std::vector<wire::LogEntry>& log,
                       Instant now);

  void add_candidate(ConnectionId connection, const wire::Join& join, const std::string& seen,
                     Instant now);
  // A member's new control connection. `log`: what it answered to RequestLog, or null.
  enum class Return : std::uint8_t {
    in,
    out,        // it is no member any more
    needs_log,  // it knows decisions that we do not: ask for its log, and call this again with it
  };
  Return rejoin(ConnectionId connection, const wire::Rejoin& rejoin,
                const std::vector<wire::LogEntry>* log, Instant now);
  void on_message(ConnectionId from, const wire::Frame& frame, Instant now);
  void on_disconnect(ConnectionId connection, Instant now);
  void on_time(Instant now);
  // The peer broke the rules; it goes, with this sentence.
  void evict(ConnectionId connection, Code code, const std::string& reason, Instant now);

  // -- replicas
  // 0: this group's peers belong to none.
  [[nodiscard]] std::uint32_t ranks_per_replica() const { return empty() ? 0 : ranks_; }
  [[nodiscard]] std::vector<RankStanding> ranks() const;
  // The member is in a call.
  [[nodiscard]] bool busy(const PeerId& id) const;
  // `points`: that were passed before. REQUIRES: no members; a newcomer that waits, of each.
  void start_with(const std::vector<std::string>& replicas, std::uint64_t points);
  // The others have started: who waited only for that asks again when its program comes so far.
  void leave_behind();
  void retry_admission(Instant now);
  // The replica's rank here, as a member and as a newcomer.
  void evict_rank(const std::string& replica, bool member, bool newcomers,
                  const std::string& reason, Instant now);
  // A line for the log of its user.
  void tell_rank(const std::string& replica, const std::string& text);

  // Asks some members whether they can connect there; who was asked.
  [[nodiscard]] std::vector<PeerId> ask_members(const wire::Try& question, std::size_t most,
                                                const std::function<bool(ConnectionId)>& fit);
  [[nodiscard]] PeerId member_on(ConnectionId connection) const;
  [[nodiscard]] bool knows(ConnectionId connection) const;
  [[nodiscard]] const wire::EpochRecord& record() const { return record_; }
  [[nodiscard]] std::uint64_t last_ordinal() const { return last_ordinal_; }
  [[nodiscard]] std::uint64_t collected() const { return collected_; }
  [[nodiscard]] bool empty() const { return members_.empty() && candidates_.empty(); }
  // A decision falls due within some hundred milliseconds.
  [[nodiscard]] bool hurried() const;
  // Open operations with who entered and who is done: for the tests of rebuild.
  [[nodiscard]] std::string summary() const;
  // Every member that has entered a call which is still open: for tests.
  [[nodiscard]] std::vector<std::pair<wire::CallKey, PeerId>> open_entries() const;

 private:
  struct Peer {
    wire::Member member;
    ConnectionId connection = 0;
    Instant heard{};
    // candidate
    std::uint32_t min_peers = 1;
    std::uint32_t order = 0xffffffff;
    bool waiting = false;
    bool start_only = false;
    std::string seen;  // the address we see it at
    std::uint64_t prepared_epoch = 0;
    std::set<PeerId> unreachable;  // members, as it says
    // memory
    std::set<PeerId> shares_with;
    std::uint32_t sharing_pending = 0;
    // member
    Instant disconnected_at{};
    std::uint64_t applied = 0;
    std::uint64_t blocked_at_ordinal = 0;  // what it had applied when it said it was blocked
    wire::Blocked blocked;
    // of what it causes: Options
    Allowance strays;
    Allowance aborts;
    Allowance turns;
    Allowance restarts;
    Allowance wants;
    Allowance talk;
    bool returned = true;  // else it has not come back since this master was restarted
  };
  // A plan, what it was chosen from, and which links of it, and beside it, may be relayed.
  struct Draft {
    topology::Choice choice;
    wire::RateTable rates;
    std::vector<wire::RankPair> relayed;
  };
  struct Entry {
    wire::Signature signature;
    std::uint64_t attempt = 0;
    bool done = false;
  };
  struct OpenOperation {
    std::map<PeerId, Entry> entries;
    bool rerun = false;
    Instant opened{};
    std::optional<Instant> met;  // all members have entered
    std::optional<Instant> mismatch_since;
    std::optional<Instant> noticed;  // its members were told whom they wait for
  };
  struct OpenRound {
    std::map<PeerId, wire::RoundPayload> entered;
    std::uint64_t bytes = 0;  // of all lists of entries that came
    Instant opened{};
    std::optional<Instant> noticed;  // its members were told whom they wait for
  };
  struct LinkTrouble {
    wire::LinkState state = wire::LinkState::broken;
    Instant since{};
    std::string reason;
    bool late = false;   // of an earlier epoch: counts only beside a broken control connection
    bool broke = false;  // what was under way on it is lost, even if it is up again
  };
  struct Departed {
    PeerId id;
    Code code = Code::evicted;
    std::string reason;
    bool finished = false;  // it left in good order
  };

  // -- the log
  void append(std::variant<wire::EpochRecord, wire::Verdict, wire::Outcome> what);
  void begin_epoch(wire::Cause cause, std::vector<wire::Departure> departures,
                   std::vector<wire::OpKey> aborted);
  void decide(const wire::CallKey& key, Code code, const PeerId& culprit, const std::string& reason,
              const std::string& waiting, const wire::SyncDecision& sync = {});
  void advance_collected();
  bool adopt(const std::vector<wire::LogEntry>& log, std::uint64_t applied);

  // -- membership
  void replan_hosts(Instant now);
  [[nodiscard]] const std::vector<std::uint32_t>& present_hosts();
  [[nodiscard]] bool sharing_settled() const;
  void start_over(wire::Cause cause, std::vector<wire::Departure> departures,
                  const std::vector<wire::OpKey>& aborted);
  void start_if_ready(Instant now);
  void start(std::vector<Peer> founders);
  [[nodiscard]] Peer take_candidate(std::size_t at);
  [[nodiscard]] std::uint32_t missing() const;
  [[nodiscard]] wire::Expect expected() const;
  void tell_newcomers();
  bool let_in_again(ConnectionId connection, const wire::Join& join, const PeerId& seal,
                    Instant now);
  void send_log(const Peer& to, std::uint64_t after);
  [[nodiscard]] bool newcomer_ready(const Peer& candidate) const;
  [[nodiscard]] bool fits(const Peer& candidate) const;
  [[nodiscard]] std::set<topology::Edge> ranks_of(
      const std::set<std::pair<PeerId, PeerId>>& pairs) const;
  [[nodiscard]] bool newcomers_ready() const;
  void remove(const std::vector<Departed>& departed, Instant now);
  // record_.plan, and what it is chosen from, for the present members; false when no plan avoids
  // the unusable links, even if those are relayed that may be
  bool plan_epoch();
  [[nodiscard]] std::optional<Draft> draft_plan();
  void take_plan(Draft draft);
  [[nodiscard]] bool has_plan(std::size_t world, const std::set<topology::Edge>& unusable,
                              const std::set<topology::Edge>& unrelayable) const;
  void on_want_relay(Peer& from, const wire::WantRelay& want, Instant now);
  [[nodiscard]] std::set<std::pair<PeerId, PeerId>> relayed_pairs() const;
  void reconsider_plan(Instant now);
  [[nodiscard]] Peer* member(const PeerId& id);
  [[nodiscard]] Peer* by_connection(ConnectionId connection);
  [[nodiscard]] std::size_t rank_of(const PeerId& id) const;
  [[nodiscard]] std::vector<PeerId> member_ids() const;  // in rank order

  // -- calls
  void on_operation(Peer& from, const wire::OpState& state, std::uint64_t applied, Instant now);
  void check_operation(const wire::OpKey& key, Instant now);
  void on_round(const PeerId& from, const wire::RoundEntry& entry, std::uint64_t applied,
                Instant now);
  void check_round(const wire::RoundKey& key, Instant now);
  void let_newcomers_in(wire::RoundKind kind, const std::vector<std::string>& replicas);
  void check_sync(const wire::RoundKey& key, Instant now);
  void optimize(const wire::RoundKey& key);
  [[nodiscard]] bool measuring_helps();
  [[nodiscard]] bool measure_at(const wire::RoundKey& key);
  void check_calls(Instant now);
  void check_stuck(Instant now);
  [[nodiscard]] bool silent(const Peer& peer, Instant now) const;
  void on_mended(const std::pair<PeerId, PeerId>& pair, bool through_us, Instant now);
  void check_links(Instant now);
  [[nodiscard]] bool plan_around(const std::vector<BadLink>& bad);
  void evict_for_links(const std::vector<BadLink>& bad, std::vector<BadLink> overdue, Instant now);
  [[nodiscard]] std::vector<BadLink> worn_links(Instant now);
  void notice_stragglers(Instant now);
  void end_overdue(Instant now);
  [[nodiscard]] bool decided_beyond(const wire::CallKey& key, std::uint64_t applied) const;
  [[nodiscard]] bool entered_by_all(const wire::CallKey& key) const;
  [[nodiscard]] bool too_much(const PeerId& from, const wire::RoundEntry& entry) const;
  [[nodiscard]] PeerId busiest() const;
  void evict_busiest(Instant now);
  void evict_laggards(Instant now);
  void tell_namesake(ConnectionId connection);
  void tell_lone_founder(Instant now);
  [[nodiscard]] std::string named(const PeerId& id) const;
  [[nodiscard]] std::string called(const wire::CallKey& key) const;
  bool stray(Peer& from, const char* what, Instant now);
  bool floods(Peer& from, std::size_t items, Instant now);

  std::uint32_t id_;
  std::uint32_t ranks_ = 0;  // per replica; as the peers that are here say
  Options options_;
  Surroundings& around_;
  wire::EpochRecord record_;
  std::vector<Peer> members_;       // in rank order
  std::vector<Peer> candidates_;    // in order of joining
  std::deque<wire::LogEntry> log_;  // not yet collected by all
  std::uint64_t last_ordinal_ = 0;
  std::uint64_t collected_ = 0;
  std::uint64_t rebuilt_at_ = 0;  // last_ordinal_ when the group was brought back from reports
  std::map<wire::CallKey, std::uint64_t> decided_;  // verdicts not yet collected by all -> ordinal
  std::map<wire::OpKey, OpenOperation> operations_;
  std::map<wire::RoundKey, OpenRound> rounds_;
  std::map<std::pair<PeerId, PeerId>, LinkTrouble> trouble_;  // (reporter, about)
  std::map<std::pair<PeerId, PeerId>, Allowance> breaks_;     // smaller id first
  std::set<std::pair<PeerId, PeerId>> unusable_;     // smaller id first; the plan goes without
  std::set<std::pair<PeerId, PeerId>> unavoidable_;  // no plan goes without these as well
  // Of the unusable: that did not come about through the master either.
  std::set<std::pair<PeerId, PeerId>> unrelayable_;
  std::set<std::pair<PeerId, PeerId>> wanted_;  // relayed, and asked for since we are the master
  std::optional<std::vector<std::uint32_t>> hosts_;  // present_hosts(), until it may have changed
  std::optional<Instant> hosts_differ_since_;        // from the plan's
  // What is known of the links between record_.members; the record has what the plan came from.
  wire::RateTable rates_;
  bool rates_moved_ = false;  // since the plan was considered
  bool better_plan_ = false;  // there was one when it was
  Instant reconsidered_{};
  bool slow_ = false;                   // an operation took long
  std::uint64_t asked_to_measure_ = 0;  // the admission after which members were
  std::optional<Instant> stuck_since_;
  std::optional<Instant> alone_since_;  // one peer started the group, and has not been told of this
  std::optional<Instant> others_at_;    // when a peer went
  Instant last_tick_{};
};

}  // namespace pccl::master
