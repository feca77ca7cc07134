// The master: routes each control connection to its group, and what comes before that to the part
// which it concerns. Pure: (event, now) in, actions out. server/ does the I/O. Each part uses only
// those before it:
//
//   Outbox, Connections    actions for the server; control connections, and who is at them
//   ServedGroups           the groups, and with several masters their quorums
//   Replicas               the rules about peers of several groups
//   Returning              members that have returned, with their reports and logs
//   Restart                one master: rebuilds groups after a restart
//   Takeover               several masters: takes over groups, and gives them up
//   Inquiries, Operators   questions of peers about their reachability; status and commands
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pccl/master/inquiries.h"
#include "pccl/master/operators.h"
#include "pccl/master/restart.h"
#include "pccl/master/takeover.h"

namespace pccl::master {

// *one thread: the server's*
class Master final : private Surroundings {
 public:
  Master(const Options& options, std::uint64_t run, std::uint32_t term)
      : options_(options), run_{.own = run, .id = run, .term = term} {}

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
  [[nodiscard]] wire::RunStatus status(Instant now) const { return operators_.status(now); }

  [[nodiscard]] std::vector<Action> take_actions() { return outbox_.take(); }
  [[nodiscard]] std::uint64_t run() const { return run_.id; }
  [[nodiscard]] std::uint32_t term() const { return run_.term; }
  // Null: this master does not serve the group.
  [[nodiscard]] const Group* group(std::uint32_t id) const { return served_.find(id); }
  // With several masters. Null: this master does not serve the group.
  [[nodiscard]] const Quorum* quorum(std::uint32_t group) const { return served_.quorum(group); }
  // Whether the connection's peer has not identified itself. The server strictly limits such
  // connections.
  [[nodiscard]] bool anonymous(ConnectionId connection) const;
  // Whether nothing of this peer's membership remains: it is in no group, and all epochs are
  // decided.
  [[nodiscard]] bool departed(const PeerId& peer) const;
  // Whether the connection's peer is a member of an epoch. Other peers need no long messages.
  [[nodiscard]] bool member(ConnectionId connection) const { return served_.member(connection); }
  // Whether the connection's peer may send long messages: a member, or a returning member that was
  // asked for its log.
  [[nodiscard]] bool may_be_long(ConnectionId connection) const;

 private:
  // -- messages
  void hear_peer(ConnectionId id, ControlPeer& connection, const wire::Frame& frame, Instant now);
  void hear_first(ConnectionId id, ControlPeer& connection, const wire::Frame& frame, Instant now);
  [[nodiscard]] bool hear_several(ConnectionId id, ControlPeer& connection,
                                  const wire::Frame& frame, Instant now);

  // -- consequences
  void recover_if_ready(std::uint32_t group, Instant now);
  void settle_replicas(Instant now);
  void close_late(Instant now);

  // -- the surroundings of a group
  void send(ConnectionId to, std::uint64_t collected, const wire::Message& message) override {
    served_.send(to, collected, message);
  }
  void close(ConnectionId connection) override { served_.close(connection); }
  void log(LogLine line) override { outbox_.log(std::move(line)); }
  [[nodiscard]] Instant now() const override { return outbox_.now(); }
  [[nodiscard]] bool admission_paused() const override { return run_.admission_paused; }
  void appended(std::uint32_t group, const wire::LogEntry& entry) override {
    served_.appended(group, entry);
  }
  wire::Census census() override { return served_.census(); }
  std::uint64_t next_join_ordinal() override { return ++run_.joins; }
  std::optional<std::pair<RelayToken, RelayToken>> expect_relay(const PeerId& one,
                                                                const PeerId& other,
                                                                const std::string& names) override;
  void end_relay(const PeerId& one, const PeerId& other) override {
    outbox_.add(EndRelay{one, other});
  }
  ReplicaRules& replicas() override { return replicas_; }

  Options options_;
  ServedRun run_;
  Outbox outbox_;
  Connections connections_{options_, run_, outbox_};
  ServedGroups served_{options_, run_, connections_, outbox_, *this};
  Replicas replicas_{options_, served_.all(), run_.admission_paused};
  Returning returning_{options_, run_, connections_, outbox_, served_};
  Restart restart_{options_, run_, connections_, outbox_, served_, returning_, replicas_, *this};
  Takeover takeover_{options_, run_, connections_, outbox_, served_, returning_, *this};
  Inquiries inquiries_{options_, connections_, outbox_, served_};
  Operators operators_{options_, run_, connections_, outbox_, served_};
  Instant last_heartbeat_{};
};

}  // namespace pccl::master
