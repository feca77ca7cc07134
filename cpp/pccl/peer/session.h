// A peer's conversation with the master: joins, follows the group's log, reports its calls, comes
// back after a broken connection. Sans-I/O: bytes in, bytes out; what it learns goes to its host.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/base/ids.h"
#include "pccl/wire/messages.h"

namespace pccl::peer {

using Record = std::shared_ptr<const wire::EpochRecord>;

struct JoinOptions {
  PeerId id;
  std::uint32_t group = 0;
  std::uint32_t min_peers = 1;
  bool waiting = true;      // wait to be a member from the start
  bool start_only = false;  // ... unless the group has started already: then request_admission says
                            // when (level 2)
  std::vector<wire::Address> addresses;
  std::string software;
  std::uint32_t order = 0xffffffff;  // among those who found the group together
  PeerId word;                       // wire::Member::word
  PeerId ticket;                     // wire::Rejoin::ticket
  std::string replica;               // wire::Member::replica
  std::uint32_t ranks_per_replica = 0;
};

// What members find that call an operation a loss ended before they came to it.
Error loss_error(const wire::EpochRecord& record);

// How a call ended, and the epoch in which that was decided: what a member that makes the call
// later must be told, exactly as those that were in it.
struct Covering {
  Error error;
  Record record;
};

// What a session tells. Called from inside its methods.
class SessionHost {
 public:
  virtual ~SessionHost() = default;
  virtual void on_welcome(const wire::Welcome& welcome, bool again) = 0;
  virtual void on_epoch(const Record& record) = 0;
  virtual void on_verdict(const wire::Verdict& verdict) = 0;
  virtual void on_outcome(const wire::Outcome& outcome) = 0;
  virtual void on_prepare(const wire::Prepare& prepare) = 0;
  virtual void on_expect(const wire::Expect& expect) = 0;
  virtual void on_notice(const std::string& text) = 0;
  virtual void on_try(const wire::Try& question) = 0;
  virtual void on_relay(const wire::Relay& relay) = 0;
  // The master wants this peer no more.
  virtual void on_refused(const Error& error) = 0;
};

// *one thread: the engine's*
class Session {
 public:
  Session(JoinOptions options, SessionHost& host) : options_(std::move(options)), host_(host) {}

  // -- the control connection
  void on_open();  // says Join or Rejoin
  // A bad status: these bytes are no master's; drop the connection.
  Status on_bytes(std::span<const std::uint8_t> bytes);
  void on_lost();
  [[nodiscard]] std::vector<wire::Bytes> take_output() { return std::exchange(output_, {}); }
  [[nodiscard]] bool welcomed() const { return welcomed_; }

  // -- what the peer says. Dropped while the connection is down; on Welcome all that still matters
  // is said again.
  void request_admission();
  void withdraw_admission();
  void prepared(std::uint64_t epoch, const std::vector<PeerId>& without);
  void enter(const wire::RoundKey& key, wire::RoundPayload payload = wire::Nothing{});
  void report(const std::vector<wire::OpState>& states);
  // `lost`: wire::AbortRequest::lost.
  void request_abort(const wire::CallKey& key, Code code, const PeerId& lost = {});
  void measured(const wire::Measurements& row);
  void report_link(const PeerId& peer, wire::LinkState state, const std::string& reason);
  void blocked(const wire::Blocked& blocked);
  void tried(std::uint64_t number, bool reached, const std::string& reason);
  void want_relay(const PeerId& peer, std::uint32_t stripes);
  void leave(const std::string& reason);
  void neighbourhood(wire::Neighbourhood neighbours);
  void stop() {
    open_ = false;
  }  // nothing is heard or said any more; what was said is still to be written
  void heartbeat();

  // -- what the peer knows
  [[nodiscard]] const PeerId& id() const { return options_.id; }
  [[nodiscard]] std::uint64_t run() const { return run_; }
  [[nodiscard]] std::uint32_t term() const { return term_; }
  [[nodiscard]] const Record& record() const { return record_; }  // null before the admission
  [[nodiscard]] bool member() const { return record_ != nullptr; }
  // The messages of a member that comes back: the first one, the answer to RequestLog, and what
  // follows the Welcome. REQUIRES: member().
  [[nodiscard]] wire::Rejoin rejoin() const;
  [[nodiscard]] std::vector<wire::LogPart> log_parts() const;
  [[nodiscard]] std::vector<wire::Message> open_calls() const;
  // The verdict a call that is entered only now has got already; each is given once.
  [[nodiscard]] std::optional<Covering> take_covering(const wire::CallKey& key);
  [[nodiscard]] std::uint64_t applied() const { return applied_; }
  // The master was told of this operation, in this attempt or one before, and has not decided it.
  [[nodiscard]] bool has_reported(const wire::OpKey& key) const {
    return operations_.contains(key);
  }

 private:
  void say(const wire::Message& message);
  void say_again();
  void on_frame(const wire::Frame& frame);
  Status apply(const wire::LogEntry& entry);

  JoinOptions options_;
  SessionHost& host_;
  wire::FrameReader reader_;
  std::vector<wire::Bytes> output_;
  bool open_ = false;
  bool welcomed_ = false;  // on this connection
  bool joined_ = false;    // ever
  std::uint64_t run_ = 0;
  std::uint32_t term_ = 0;
  Record record_;
  std::uint64_t applied_ = 0;
  std::uint64_t collected_ = 0;
  std::deque<wire::LogEntry> log_;                   // not known to be collected by all
  std::map<wire::OpKey, wire::OpState> operations_;  // reported, without a verdict
  std::map<wire::RoundKey, wire::RoundPayload> rounds_;
  std::map<wire::CallKey, wire::AbortRequest> aborts_;
  std::optional<wire::Neighbourhood> neighbourhood_;
  std::map<wire::CallKey, Covering> covering_;
  Status broken_;
};

}  // namespace pccl::peer
