// The master: routes each control connection to its group, and rebuilds groups from their members'
// reports after a restart. Pure: (event, now) in, actions out. server/ does the I/O.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "pccl/base/allowance.h"
#include "pccl/master/event_log.h"
#include "pccl/master/group.h"
#include "pccl/master/quorum.h"
#include "pccl/master/replicas.h"

namespace pccl::master {

struct Send {
  ConnectionId to = 0;
  wire::Bytes bytes;
};
// Close after flushing earlier messages.
struct Close {
  ConnectionId connection = 0;
};
// Connect to the address, close the connection, and report the result by on_tried. Not needed once
// the asking connection is gone.
struct TryAddress {
  ConnectionId for_whom = 0;
  wire::Address address;
};
// Two connections will send OpenRelay, one with each token. Relay between them. A token is valid
// once.
struct ExpectRelay {
  PeerId one;  // the peers at the ends
  PeerId other;
  PeerId token_of_one;
  PeerId token_of_other;
  std::string names;  // of the peers: "one and other"
};
// End all relaying between these two peers.
struct EndRelay {
  PeerId one;
  PeerId other;
};
using Action = std::variant<Send, Close, LogLine, TryAddress, ExpectRelay, EndRelay>;

// Another run id, from the one before. splitmix64; never 0.
[[nodiscard]] std::uint64_t next_run(std::uint64_t run);

// *one thread: the server's*
class Master final : private Surroundings {
 public:
  Master(const Options& options, std::uint64_t run, std::uint32_t term)
      : options_(options), own_run_(run), run_(run), term_(term) {}

  // `address`: the connection's remote address, without port. A connection that sends nothing for
  // the handshake timeout is closed.
  void on_connect(ConnectionId connection, const std::string& address, Instant now);
  void on_frame(ConnectionId connection, const wire::Frame& frame, Instant now);
  // The connection sent invalid bytes. Refuses it with `error`.
  void on_garbage(ConnectionId connection, const Error& error, Instant now);
  void on_disconnect(ConnectionId connection, Instant now);
  void on_tried(ConnectionId for_whom, bool reached, const std::string& reason, Instant now);
  void on_time(Instant now);
  // Call on_time no later than this long from now.
  [[nodiscard]] Duration tick() const;

  // -- operators
  [[nodiscard]] wire::RunStatus status(Instant now) const;

  [[nodiscard]] std::vector<Action> take_actions() { return std::exchange(actions_, {}); }
  [[nodiscard]] std::uint64_t run() const { return run_; }
  [[nodiscard]] std::uint32_t term() const { return term_; }
  [[nodiscard]] const Group* group(std::uint32_t id) const;
  // With several masters. Null: this master does not serve the group.
  [[nodiscard]] const Quorum* quorum(std::uint32_t group) const;
  // Whether the connection's peer has not identified itself. The server strictly limits such
  // connections.
  [[nodiscard]] bool anonymous(ConnectionId connection) const;
  // Whether nothing of this peer's membership remains: it is in no group, and all epochs are
  // decided.
  [[nodiscard]] bool departed(const PeerId& peer) const;
  // Whether the connection's peer is a member of an epoch. Other peers need no long messages.
  [[nodiscard]] bool member(ConnectionId connection) const;
  // Whether the connection's peer may send long messages: a member, or a returning member that was
  // asked for its log.
  [[nodiscard]] bool may_be_long(ConnectionId connection) const;

 private:
  // The log that a returning member was asked for, as far as it has arrived.
  struct AskedLog {
    Returned report;
    std::uint32_t group = 0;
    Instant since{};                 // when this member was first asked
    std::vector<wire::Bytes> parts;  // encoded: decoded entries take several times the memory
    std::size_t bytes = 0;           // in all parts
    std::size_t entries = 0;         // in all parts
    bool complete = false;
    [[nodiscard]] std::vector<wire::LogEntry> log() const;
  };
  struct Connection {
    std::string address;
    Instant since{};
    std::optional<std::uint32_t> group;
    bool recovers = false;  // a member that has returned, of a group that is not rebuilt yet
    std::optional<AskedLog> asked;
    bool closing = false;
    std::uint64_t question = 0;  // the question asked on it; 0: none
    unsigned inquiries = 0;      // received on it
    std::uint32_t term = 0;      // the highest that the member had followed when it connected
    // -- several masters; `term` is of newcomers, too
    Seat seat;                        // of the peer; empty: it has not identified itself
    bool may_found = false;           // no other master serves the group
    std::optional<wire::Join> join;   // of a newcomer whose promise is needed
    std::optional<Promised> promise;  // for the term of the takeover
  };
  // A peer's question about its own reachability.
  struct Question {
    ConnectionId from = 0;
    Instant until{};
    wire::Findings findings;
  };
  // The members of one group that have returned to this restarted master.
  struct Recovery {
    Instant since{};
    std::vector<Returned> reports;
    std::map<Seat, Instant> asked;  // members asked for their logs: since when
    // -- several masters
    std::uint32_t term = 0;        // for which promises were asked; 0: none were
    Instant promises_since{};      // when they were asked
    bool changed = true;           // since a takeover was last considered
    bool waited = false;           // as of then: the grace period was over
    std::optional<Instant> again;  // when to consider it again: members of the base may still come
  };
  // A member of the run that this address served before the master was restarted. Newcomers have
  // begun another run here meanwhile.
  struct Former {
    Returned report;
    wire::Envelope envelope;
  };
  // An epoch that reports claim to be the last decided one, or to come after it.
  struct Claim {
    std::uint64_t epoch = 0;
    std::size_t hash = 0;  // of its members
    const std::vector<Seat>* members = nullptr;
    const Returned* best = nullptr;  // the newest log that ends in this epoch; null: none does
    std::size_t supporters = 0;      // reports of it
    const AcceptedEpoch* proposed = nullptr;  // accepted only
  };
  // The epochs known to a peer that has promised. A newcomer knows none.
  struct Known {
    std::uint64_t applied = 0;
    std::uint64_t newest = 0;  // the same, or the one that it has accepted
  };
  using Knowledge = std::map<Seat, Known>;
  // The state from which a master that takes over continues.
  struct Base {
    wire::Rejoin last;                       // the record and the ordinal of the log's end
    std::optional<wire::LogEntry> proposed;  // an epoch that may be decided: it comes next
    ConnectionId source = 0;                 // the member that has the log
  };

  // Null: the connection is unknown or closing.
  [[nodiscard]] Connection* open(ConnectionId id);
  void join(ConnectionId id, Connection& connection, const wire::Join& join, Instant now);
  void rejoin(ConnectionId id, Connection& connection, const wire::Frame& frame, Instant now);
  void return_to(ConnectionId id, Connection& connection, const wire::Rejoin& rejoin,
                 const std::vector<wire::LogEntry>* log, Instant now);
  void ask_for_log(ConnectionId id, Connection& connection, const wire::Rejoin& rejoin,
                   Instant now);
  void log_part(ConnectionId id, Connection& connection, const wire::LogPart& part, Instant now);
  [[nodiscard]] bool room_for(const Returned& more) const;
  [[nodiscard]] std::size_t reported_bytes(const Seat& without) const;
  void add_report(Recovery& recovery, Returned returned);
  void forget_report(ConnectionId id);
  void recover_if_ready(std::uint32_t group, Instant now);
  // In this time those members of a run come back here that can.
  [[nodiscard]] Duration quiet_time() const;
  [[nodiscard]] bool may_still_return(Instant now) const;
  [[nodiscard]] bool are_on_their_way(Instant now) const;
  void keep_former(ConnectionId id, Connection& connection, Returned report,
                   const wire::Envelope& envelope, Instant now);
  [[nodiscard]] std::optional<std::uint64_t> run_that_is_back();
  void settle_formers(Instant now);
  void end_run_of_newcomers();
  void refuse(ConnectionId connection, Code code, const std::string& reason);

  // -- several masters: master_appeals.cpp
  [[nodiscard]] bool foreign(std::uint32_t group, const Seat& seat) const;
  void appeal(ConnectionId id, Connection& connection, const wire::Rejoin& rejoin, Instant now);
  void hear_appeals(std::uint32_t group, Instant now);

  // -- several masters: master_takeover.cpp
  void join_one(ConnectionId id, Connection& connection, const wire::Frame& frame, Instant now);
  bool let_vote(ConnectionId id, Connection& connection, const wire::Join& first);
  [[nodiscard]] bool serves_a_run() const;
  void give_up(std::uint32_t group);
  void rejoin_one(ConnectionId id, Connection& connection, const wire::Frame& frame, Instant now);
  void hear_vote(const Connection& connection, const wire::Frame& frame);
  void promised(ConnectionId id, Connection& connection, const wire::Frame& frame, Instant now);
  void take_over_if_ready(std::uint32_t group, Instant now);
  void ask_promises(std::uint32_t group, Recovery& recovery, Instant now);
  void ask_promise(ConnectionId id, Connection& connection, const Recovery& recovery);
  [[nodiscard]] std::vector<Claim> claims(const Recovery& recovery) const;
  [[nodiscard]] Knowledge knowledge(const Recovery& recovery) const;
  [[nodiscard]] static bool closed(const Claim& claim, const Knowledge& known);
  [[nodiscard]] static const Claim* proposal_after(const Claim& claim,
                                                   const std::vector<Claim>& all,
                                                   const Knowledge& known);
  [[nodiscard]] std::optional<Base> choose_base(const Recovery& recovery) const;
  [[nodiscard]] std::map<Seat, ConnectionId> gathered(std::uint32_t group,
                                                      const Recovery& recovery) const;
  [[nodiscard]] bool wanted(const Recovery& recovery, const Seat& seat) const;
  void consider_takeover(std::uint32_t group, Recovery& recovery, Instant now);
  bool give_way();
  [[nodiscard]] Instant enough_since(const Base& base,
                                     const std::map<Seat, ConnectionId>& seats) const;
  void take_over(std::uint32_t group, const Base& base, Instant now);
  void end_with(std::uint32_t group, const wire::EpochRecord& last);
  void step_down(const std::string& why);
  void settle_quorums(Instant now);
  bool settle(std::uint32_t group, Quorum& quorum, Instant now);
  [[nodiscard]] bool is_over(std::uint32_t group) const;
  void check_quorums(Instant now);
  void forget_run();
  void propose_to(ConnectionId id, const Quorum& quorum);
  [[nodiscard]] Quorum* quorum_of(ConnectionId connection);
  [[nodiscard]] std::set<Seat> voters(std::uint32_t group, const Quorum& quorum) const;
  void send_now(ConnectionId to, std::uint32_t term, std::uint64_t collected,
                const wire::Message& message);
  void close_now(ConnectionId connection);

  Group& group_for(std::uint32_t id);
  void forget_group(std::uint32_t id);
  bool make_room_for_group();
  void settle_replicas(Instant now);
  void command(ConnectionId id, Connection& connection, const wire::Command& command, Instant now);
  [[nodiscard]] wire::CommandResult carry_out(const wire::Command& command, Instant now);
  [[nodiscard]] wire::CommandResult pause_admission(bool pause);
  void answer_status(ConnectionId id, Connection& connection, Instant now);
  void inquire(ConnectionId id, Connection& connection, const wire::Inquiry& inquiry, Instant now);
  void on_tried(const PeerId& peer, const wire::Tried& tried, Instant now);
  void answer_questions(Instant now);
  [[nodiscard]] bool may_try(ConnectionId member, const std::string& address) const;

  void send(ConnectionId to, std::uint64_t collected, const wire::Message& message) override;
  void close(ConnectionId connection) override;
  void appended(std::uint32_t group, const wire::LogEntry& entry) override;
  void log(LogLine line) override {
    events_.add(line, now_);
    actions_.emplace_back(std::move(line));
  }
  void log(std::string text) { log(LogLine{false, {}, 0, std::move(text)}); }
  void at(Instant now) {
    now_ = now;
    if (began_ == Instant{}) began_ = now;
  }
  [[nodiscard]] Instant now() const override { return now_; }
  [[nodiscard]] bool admission_paused() const override { return admission_paused_; }
  void log_rarely(const std::string& line, Instant now) {
    if (const auto limited = rare_.line(line, now)) log(*limited);
  }
  wire::Census census() override;
  std::uint64_t next_join_ordinal() override { return ++joins_; }
  std::optional<std::pair<PeerId, PeerId>> expect_relay(const PeerId& one, const PeerId& other,
                                                        const std::string& names) override;
  void end_relay(const PeerId& one, const PeerId& other) override {
    actions_.emplace_back(EndRelay{one, other});
  }
  ReplicaRules& replicas() override { return replicas_; }

  Options options_;
  std::uint64_t own_run_;  // the id of a run that begins here
  std::uint64_t run_;      // the same, or the id of the returned members' run
  std::uint32_t term_;
  std::uint64_t joins_ = 0;
  Instant last_heartbeat_{};
  std::map<ConnectionId, Connection> connections_;
  Groups groups_;
  Replicas replicas_{options_, groups_, admission_paused_};
  std::map<std::uint32_t, Recovery> recoveries_;
  std::map<ConnectionId, Former> formers_;
  std::map<std::uint32_t, Quorum> quorums_;    // of groups that this master serves; several masters
  std::set<std::uint32_t> undecided_;          // of these, those with a proposal
  std::map<std::uint32_t, Recovery> appeals_;  // to these: members of other epochs
  Allowance gives_way_;                        // to them
  std::set<std::uint32_t> served_terms_;
  std::uint32_t given_up_ = 0;  // the highest term of a group that was given up
  Instant last_tick_{};
  // Several masters: its first event, or when members last came from another one or went there.
  std::optional<Instant> quiet_since_;
  std::map<Seat, Allowance> step_downs_;  // for a member that has followed a higher term
  std::map<std::uint64_t, Question> questions_;
  std::uint64_t next_question_ = 1;
  Allowance attempts_;  // to reach asking peers
  RareLines rare_;      // log lines caused by strangers
  Allowance status_questions_;
  Allowance commands_;
  EventLog events_;
  bool admission_paused_ = false;
  Instant began_{};  // the time of the first event
  Instant now_{};    // the time of the present event
  std::vector<Action> actions_;
};

}  // namespace pccl::master
