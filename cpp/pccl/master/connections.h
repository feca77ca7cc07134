// The control connections of a master, and what their peers have said so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "pccl/master/limits.h"
#include "pccl/master/outbox.h"
#include "pccl/master/returned.h"
#include "pccl/wire/messages.h"

namespace pccl::master {

// The run that a master serves.
struct ServedRun {
  std::uint64_t own = 0;  // the id of a run that begins here
  std::uint64_t id = 0;   // `own`, or the id of the returned members' run
  std::uint32_t term = 0;
  std::uint64_t joins = 0;        // the ordinal of the latest newcomer
  bool admission_paused = false;  // by the operator
  // Several masters: since when no members have come from another master or gone there. Empty: this
  // master has seen no event.
  std::optional<Instant> quiet_since{};
};

// Another run id, from the one before. splitmix64; never 0.
[[nodiscard]] std::uint64_t next_run(std::uint64_t run);

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

// The peer at a control connection.
struct ControlPeer {
  std::string address;                 // the remote one, without port
  Instant since{};                     // the handshake timeout counts from here
  std::optional<std::uint32_t> group;  // the peer is in this group, which the master serves
  bool recovers = false;               // the peer waits for a group that is not served yet
  std::optional<AskedLog> asked;       // the log of a returned member
  bool closing = false;                // the master has closed it
  std::uint64_t question = 0;          // the number of the question asked on it; 0: none was
  unsigned inquiries = 0;              // how many were received on it, of any kind
  std::uint32_t term = 0;              // the highest that the peer had followed when it connected
  Seat seat;                           // several masters: of the peer; empty: not identified yet
  bool may_found = false;              // several masters: no other one serves the group
  std::optional<wire::Join> join;      // several masters: of a newcomer whose promise is needed
  std::optional<Promised> promise;     // several masters: for the term of the takeover
};

// *one thread: the master's*
class Connections {
 public:
  Connections(const Options& options, const ServedRun& run, Outbox& outbox)
      : options_(options), run_(run), outbox_(outbox) {}

  void add(ConnectionId id, const std::string& address);
  void erase(ConnectionId id) { connections_.erase(id); }
  [[nodiscard]] std::map<ConnectionId, ControlPeer>& all() { return connections_; }
  [[nodiscard]] const std::map<ConnectionId, ControlPeer>& all() const { return connections_; }
  [[nodiscard]] ControlPeer& at(ConnectionId id) { return connections_.at(id); }
  [[nodiscard]] const ControlPeer& at(ConnectionId id) const { return connections_.at(id); }
  // Null: the connection is unknown.
  [[nodiscard]] const ControlPeer* find(ConnectionId id) const;
  // Null: the connection is unknown or closing.
  [[nodiscard]] ControlPeer* open(ConnectionId id);

  void send(ConnectionId to, std::uint32_t term, std::uint64_t collected,
            const wire::Message& message);
  void close(ConnectionId id);
  // Says why, and closes.
  void refuse(ConnectionId id, Code code, const std::string& reason);
  // Closes the connections of the peers of this group, or of all groups if it is empty. They are in
  // no group then. `say(id)` comes first.
  template <class Say>
  void part_from(std::optional<std::uint32_t> group, const Say& say) {
    for (auto& [id, connection] : connections_) {
      if (!connection.group || (group && connection.group != group)) continue;
      say(id);
      connection.group.reset();
      close(id);
    }
  }

 private:
  const Options& options_;
  const ServedRun& run_;
  Outbox& outbox_;
  std::map<ConnectionId, ControlPeer> connections_;
};

}  // namespace pccl::master
