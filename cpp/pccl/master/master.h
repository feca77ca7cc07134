// The master: routes each control connection to its group, and brings a run back from its members'
// reports when this master has no memory of it. Pure: (event, now) in, actions out. server.cpp is
// the only file with I/O.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "pccl/base/allowance.h"
#include "pccl/master/group.h"
#include "pccl/master/replicas.h"

namespace pccl::master {

struct Send {
  ConnectionId to = 0;
  wire::Bytes bytes;
};
// Flush what was sent before, then close.
struct Close {
  ConnectionId connection = 0;
};
struct LogLine {
  std::string text;
};
// Connect there, close again, and say by on_tried how that went; of no use any more when who asked
// has gone.
struct TryAddress {
  ConnectionId for_whom = 0;
  wire::Address address;
};
// Two connections will come that say OpenRelay with these tokens, each good for one: what comes on
// one goes out on the other.
struct ExpectRelay {
  PeerId one;  // who they are between
  PeerId other;
  PeerId token_of_one;
  PeerId token_of_other;
};
// Nothing more is relayed between these two.
struct EndRelay {
  PeerId one;
  PeerId other;
};
using Action = std::variant<Send, Close, LogLine, TryAddress, ExpectRelay, EndRelay>;

// *one thread: the server's*
class Master final : private Surroundings {
 public:
  Master(const Options& options, std::uint64_t run, std::uint32_t term)
      : options_(options), own_run_(run), run_(run), term_(term) {}

  // `address`: where the connection comes from, without the port. It is dropped when it says
  // nothing for the handshake timeout.
  void on_connect(ConnectionId connection, const std::string& address, Instant now);
  void on_frame(ConnectionId connection, const wire::Frame& frame, Instant now);
  // The bytes were not ours; `error` says why. The connection is refused with that sentence.
  void on_garbage(ConnectionId connection, const Error& error, Instant now);
  void on_disconnect(ConnectionId connection, Instant now);
  void on_tried(ConnectionId for_whom, bool reached, const std::string& reason, Instant now);
  void on_time(Instant now);
  // Call on_time no later than this long from now.
  [[nodiscard]] Duration tick() const;

  [[nodiscard]] std::vector<Action> take_actions() { return std::exchange(actions_, {}); }
  [[nodiscard]] std::uint64_t run() const { return run_; }
  [[nodiscard]] std::uint32_t term() const { return term_; }
  [[nodiscard]] const Group* group(std::uint32_t id) const;
  // True until the peer on it has said who it is: the server allows such a connection little.
  [[nodiscard]] bool anonymous(ConnectionId connection) const;
  // The peer on it is in an epoch: until then it has nothing long to say.
  [[nodiscard]] bool member(ConnectionId connection) const;
  // It is a member's, or a member that came back was asked for its log on it.
  [[nodiscard]] bool may_be_long(ConnectionId connection) const;

 private:
  // The log of a member that came back, as far as it has come. The member was asked for it.
  struct AskedLog {
    Returned report;
    std::uint32_t group = 0;
    Instant since{};                 // the first question to this member
    std::vector<wire::Bytes> parts;  // as they came: in memory, entries are several times as long
    std::size_t bytes = 0;           // of all parts
    std::size_t entries = 0;         // of all parts
    bool complete = false;
    [[nodiscard]] std::vector<wire::LogEntry> log() const;
  };
  struct Connection {
    std::string address;
    Instant since{};
    std::optional<std::uint32_t> group;
    bool recovers = false;  // a member that came back, of a group that is not back yet
    std::optional<AskedLog> asked;
    bool closing = false;
    std::uint64_t question = 0;  // that was asked on it; 0: none
    unsigned inquiries = 0;      // with and without one
  };
  // Somebody wants to know who can reach it.
  struct Question {
    ConnectionId from = 0;
    Instant until{};
    wire::Findings findings;
  };
  // Members that came back to a master that does not know their group (it was restarted).
  struct Recovery {
    Instant since{};
    std::vector<Returned> reports;
    std::map<Seat, Instant> asked;  // for their logs, since when
  };

  void join(ConnectionId id, Connection& connection, const wire::Join& join, Instant now);
  void rejoin(ConnectionId id, Connection& connection, const wire::Frame& frame, Instant now);
  void return_to(ConnectionId id, Connection& connection, const wire::Rejoin& rejoin,
                 const std::vector<wire::LogEntry>* log, Instant now);
  void ask_for_log(ConnectionId id, Connection& connection, const wire::Rejoin& rejoin,
                   Instant now);
  void log_part(ConnectionId id, Connection& connection, const wire::LogPart& part, Instant now);
  // For what members report before their group is back.
  [[nodiscard]] bool room_for(const Returned& more) const;
  [[nodiscard]] std::size_t reported_bytes(const Seat& without) const;
  void forget_report(ConnectionId id);
  void recover_if_ready(std::uint32_t group, Instant now);
  void refuse(ConnectionId connection, Code code, const std::string& reason);
  Group& group_for(std::uint32_t id);
  void forget_group(std::uint32_t id);
  bool make_room_for_group();
  void settle_replicas(Instant now);
  void inquire(ConnectionId id, Connection& connection, const wire::Inquiry& inquiry, Instant now);
  void on_tried(const PeerId& peer, const wire::Tried& tried, Instant now);
  void answer_questions(Instant now);
  [[nodiscard]] bool may_try(ConnectionId member, const std::string& address) const;

  void send(ConnectionId to, std::uint64_t collected, const wire::Message& message) override;
  void close(ConnectionId connection) override;
  void log(std::string line) override { actions_.emplace_back(LogLine{std::move(line)}); }
  wire::Census census() override;
  std::uint64_t next_join_ordinal() override { return ++joins_; }
  std::optional<std::pair<PeerId, PeerId>> expect_relay(const PeerId& one,
                                                        const PeerId& other) override;
  void end_relay(const PeerId& one, const PeerId& other) override {
    actions_.emplace_back(EndRelay{one, other});
  }
  void replicas_changed() override { replicas_.changed(); }
  void rank_departed(std::uint32_t group, const wire::Member& peer, const std::string& reason,
                     bool member, bool finished) override {
    replicas_.departed(group, peer, reason, member, finished);
  }
  void rank_away(std::uint32_t group, const wire::Member& peer,
                 const std::string& reason) override {
    replicas_.away(group, peer, reason);
  }
  std::optional<std::vector<std::string>> replicas_to_admit(std::uint32_t group,
                                                            std::uint64_t point) override {
    return replicas_.to_admit(group, point);
  }
  bool replicas_wait(std::uint32_t group, std::uint64_t point) override {
    return replicas_.wait(group, point);
  }
  bool replicas_started() override { return replicas_.started(); }
  std::uint32_t replicas_missing() override { return replicas_.missing(); }

  Options options_;
  std::uint64_t own_run_;  // of runs that begin here
  std::uint64_t run_;      // the same, or that of the members that came back
  std::uint32_t term_;
  std::uint64_t joins_ = 0;
  Instant last_heartbeat_{};
  std::map<ConnectionId, Connection> connections_;
  Groups groups_;
  Replicas replicas_{options_, groups_};
  std::map<std::uint32_t, Recovery> recoveries_;
  std::map<std::uint64_t, Question> questions_;
  std::uint64_t next_question_ = 1;
  Allowance attempts_;  // of questions
  RareLines rare_;      // of strangers
  std::vector<Action> actions_;
};

}  // namespace pccl::master
