// A peer's session with the master: joins, applies the group's log, and rejoins after a broken
// connection. Pure: bytes come in, bytes and SessionEvents go out.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/base/ids.h"
#include "pccl/peer/calls.h"
#include "pccl/wire/messages.h"

namespace pccl::peer {

struct JoinOptions {
  PeerId id;
  std::uint32_t group = 0;
  std::uint32_t min_peers = 1;
  bool waiting = true;  // ask for admission on joining
  // Simple API: `waiting` holds only until the group has started. Then Admission::request() asks.
  bool start_only = false;
  std::vector<wire::Address> addresses;
  std::string software;
  std::uint32_t order = 0xffffffff;  // of ranks among the founders of the group
  MemoryKey memory_key;              // wire::Member::memory_key
  Ticket ticket;                     // wire::Rejoin::ticket
  std::string replica;               // wire::Member::replica
  std::string name;                  // wire::Member::name
  wire::Heartbeats heartbeats;
  std::uint32_t ranks_per_replica = 0;
  std::uint32_t masters = 1;  // addresses at which a master may serve the group
  bool quiet = false;         // do not log who comes and goes
};

// The error of a call that the departures of this epoch ended.
Error loss_error(const wire::EpochRecord& record);

// Events from the master.
struct Welcomed {
  wire::Welcome welcome;
  bool again = false;  // this peer was welcomed before, on another connection
};
struct NewEpoch {
  Record record;
};
struct Dismissed {  // the master has refused or removed this peer
  Error error;
};
struct LeftBehind {  // the same, from a master that this member has not followed
  Error error;
};
using SessionEvent = std::variant<Welcomed, NewEpoch, wire::Verdict, wire::Outcome, wire::Prepare,
                                  wire::Expect, wire::Notice, wire::Try, wire::Relay, wire::Drain,
                                  Dismissed, LeftBehind, wire::NotServing>;

// *one thread: the engine's*
class Session {
 public:
  explicit Session(JoinOptions options) : options_(std::move(options)) {}

  // -- the control connection
  // Sends Join or Rejoin. `master`: which of the addresses it is. `may_found`: no other master
  // serves the group.
  void on_open(std::uint32_t master = 0, bool may_found = false);
  void on_bytes(std::span<const std::uint8_t> bytes) { reader_.feed(bytes); }
  // Takes the next event; record() is as of it. Empty: more bytes are needed. Error: the bytes are
  // not those of a master; drop the connection.
  using Event = std::optional<SessionEvent>;
  using Next = Result<Event>;
  [[nodiscard]] Next next();
  void on_lost();
  [[nodiscard]] bool has_output() const { return !output_.empty(); }
  [[nodiscard]] std::vector<wire::Bytes> take_output() { return std::exchange(output_, {}); }
  [[nodiscard]] bool welcomed() const { return welcomed_; }

  // -- messages to the master. Dropped while the connection is down.
  void say(const wire::Message& message);
  // Repeats what still matters on a new connection. `open_calls`: CallTable::open_messages.
  void say_again(const std::vector<wire::Message>& open_calls);
  void request_admission();
  void withdraw_admission();
  void report(const std::vector<wire::OpState>& states);
  void report_link(const PeerId& peer, wire::LinkState state, const std::string& reason);
  void leave(const std::string& reason);
  void neighbourhood(wire::Neighbourhood neighbours);
  // Nothing is read or sent any more. Queued output is still to be written.
  void stop() { open_ = false; }

  // -- state
  [[nodiscard]] const PeerId& id() const { return options_.id; }
  [[nodiscard]] std::uint64_t run() const { return run_; }
  [[nodiscard]] std::uint32_t term() const { return term_; }
  [[nodiscard]] const Record& record() const { return record_; }  // null before the admission
  [[nodiscard]] bool member() const { return record_ != nullptr; }
  // The messages of a returning member: the first one, and the answer to RequestLog. REQUIRES:
  // member().
  [[nodiscard]] wire::Rejoin rejoin() const;
  [[nodiscard]] std::vector<wire::LogPart> log_parts() const;
  [[nodiscard]] std::uint64_t applied() const { return applied_; }

 private:
  [[nodiscard]] Next on_frame(const wire::Frame& frame);
  [[nodiscard]] Next apply(const wire::LogEntry& entry);
  [[nodiscard]] Next accept(const wire::LogEntry& entry);
  [[nodiscard]] bool accepted_its_removal() const;

  JoinOptions options_;
  wire::FrameReader reader_;
  std::vector<wire::Bytes> output_;
  bool open_ = false;
  std::uint32_t master_ = 0;  // which of the addresses is connected
  bool welcomed_ = false;     // on this connection
  bool joined_ = false;       // ever
  std::uint64_t run_ = 0;
  std::uint32_t term_ = 0;    // the highest that was followed, or promised
  std::uint32_t served_ = 0;  // the term of the last Welcome
  bool promised_ = false;     // this peer has promised to follow no lower term
  // The epoch that this member has accepted as the next one, until the log has an entry there.
  std::optional<wire::Accepted> accepted_;
  Record record_;
  std::uint64_t applied_ = 0;
  std::uint64_t collected_ = 0;
  std::deque<wire::LogEntry> log_;       // not known to be applied by all members
  std::deque<wire::LogEntry> to_apply_;  // of the latest frame
  std::optional<wire::Neighbourhood> neighbourhood_;
};

}  // namespace pccl::peer
