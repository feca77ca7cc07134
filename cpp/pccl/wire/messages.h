// The control protocol: every message between a peer and the master.
// docs/internals/protocol.md has the table. A message is one struct; `fields` lists what is
// written, in this order.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "pccl/wire/records.h"

namespace pccl::wire {

// -- peer -> master

// First message of a new peer. Answered by Welcome or Refused.
struct Join {
  PeerId id;
  std::uint32_t group = 0;      // peers reduce only within a group
  std::uint32_t min_peers = 1;  // the group starts when this many peers wait
  bool waiting = false;         // asks for admission now; otherwise RequestAdmission may follow
  bool start_only = false;      // withdraws `waiting` if the group has started already
  std::vector<Address> addresses;
  std::string software;                 // "pccl 0.1.0", for logs and refusals
  std::uint32_t order = 0xffffffff;     // ranks the founders of a group; ties: in order of joining
  MemoryKey memory_key;                 // Member::memory_key
  std::string replica;                  // Member::replica
  std::uint32_t ranks_per_replica = 0;  // a replica has one peer in each of the groups 0 to n - 1
  Ticket ticket;                        // a secret of this peer; Member::seal is derived from it
  std::string name;                     // Member::name; empty or valid_name
  Heartbeats heartbeats;                // refused if they do not go with the master's and members'
  bool operator==(const Join&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.id, self.group, self.min_peers, self.waiting, self.start_only, self.addresses,
          self.software, self.order, self.memory_key, self.replica, self.ranks_per_replica,
          self.ticket, self.name, self.heartbeats);
  }
};

// First message of a member on a new control connection. Answered by Welcome and the log entries
// that the member lacks, by RequestLog if the master lacks entries of the member, or by Refused
// when the peer is no longer a member. After Welcome the member reports its open calls again.
struct Rejoin {
  PeerId id;
  std::uint32_t group = 0;
  EpochRecord record;         // the member's newest epoch
  std::uint64_t applied = 0;  // ordinal of the last log entry applied
  Ticket ticket{};            // as in Join
  bool operator==(const Rejoin&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.id, self.group, self.record, self.applied, self.ticket);
  }
};

// Answers RequestLog: the entries up to Rejoin::applied that some member may still lack, in order,
// in several messages of about kPartBytes. Welcome follows after the last one.
struct LogPart {
  std::vector<LogEntry> entries;
  bool last = false;
  bool operator==(const LogPart&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.entries, self.last); }
};

// A newcomer asks for admission: it has made its first collective call. Answered by Prepare, and by
// an epoch once it is admitted.
struct RequestAdmission {
  bool operator==(const RequestAdmission&) const = default;
  static void fields(auto&, auto&) {}
};

// A newcomer withdraws its request: its call reached its deadline. Not answered; the peer may have
// become a member meanwhile.
struct WithdrawAdmission {
  bool operator==(const WithdrawAdmission&) const = default;
  static void fields(auto&, auto&) {}
};

// Answers Prepare: a newcomer's links to all members of `epoch` are up, except those in `without`,
// which cannot be established. Sent again when that changes.
struct Prepared {
  std::uint64_t epoch = 0;
  std::vector<PeerId> without;  // members that it cannot reach; LinkReports give the reasons
  bool operator==(const Prepared&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.epoch, self.without); }
};

// A member enters a round. Answered by an Outcome, or by an epoch with cause admission.
struct EnterRound {
  RoundEntry entry;
  bool operator==(const EnterRound&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.entry); }
};

// Operations of a member have changed their phase. Each is answered by a Verdict once it is
// decided.
struct OpReport {
  std::vector<OpState> states;
  bool operator==(const OpReport&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.states); }
};

// A member gives a call up. Answered by the call's verdict, which may still be commit.
struct AbortRequest {
  CallKey key;
  // timeout, interrupted, or peer_lost: the remaining members cannot complete the call
  Code code = Code::timeout;
  PeerId lost{};  // peer_lost: the member without which the call cannot be completed, if known
  bool operator==(const AbortRequest&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.key, self.code, self.lost); }
};

// A member, or a newcomer that prepares, reports the state of a link. Never answered directly.
struct LinkReport {
  PeerId peer;
  LinkState state = LinkState::broken;
  std::uint64_t epoch = 0;
  std::string reason;
  bool operator==(const LinkReport&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.peer, self.state, self.epoch, self.reason);
  }
};

// The calls in which a member's threads have been blocked for a second or more. An empty list
// withdraws the previous report.
struct Blocked {
  static constexpr Duration kAfter = std::chrono::seconds(1);
  std::vector<CallKey> waits;
  bool multi_threaded = false;  // more than one thread has used the communicator
  bool outside = false;         // one of these threads is in no call now
  bool moving = false;          // links have moved bytes since the previous report
  bool operator==(const Blocked&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.waits, self.multi_threaded, self.outside, self.moving);
  }
};

// All peers with which this one shares memory now. A plan lets ranks reduce in memory once both
// ends of every pair have reported each other.
struct Neighbourhood {
  std::vector<PeerId> peers;
  std::uint32_t pending = 0;  // attempts still in progress
  bool operator==(const Neighbourhood&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.peers, self.pending); }
};

// Rates that a member has observed in its transfers since its previous report. No call waits for
// this message, unlike the row in a round of optimize_topology. Not answered; an epoch follows when
// another plan would be clearly faster.
struct Measured {
  Measurements row;
  bool operator==(const Measured&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.row); }
};

// A peer leaves, normally or with the reason of a failure. Not answered.
struct Leave {
  std::string reason;  // empty: normally
  bool operator==(const Leave&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.reason); }
};

// Sent in both directions every heartbeat interval. Carries the ordinal of its envelope. A master
// leaves the fields at their defaults.
struct Heartbeat {
  WorkDone totals;
  bool draining = false;  // the peer was asked to leave, and will at its next admission point
  Patience patience;
  bool operator==(const Heartbeat&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.totals, self.draining, self.patience); }
};

// -- master -> peer

// Answers Join and Rejoin.
struct Welcome {
  std::uint64_t joined = 0;       // this peer's join ordinal
  bool group_started = false;     // answering Join: the group has members already
  std::uint32_t waiting_for = 0;  // peers still missing until the group can start
  std::string seen;               // this peer's address as the master sees it
  std::uint32_t masters = 1;      // in the list of this master
  bool operator==(const Welcome&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.joined, self.group_started, self.waiting_for, self.seen, self.masters);
  }
};

// To a returning member that has applied more of the log than this master has. Answered by
// LogPart.
struct RequestLog {
  bool operator==(const RequestLog&) const = default;
  static void fields(auto&, auto&) {}
};

// The peer is not admitted, or is removed; the connection ends.
struct Refused {
  Code code = Code::refused;  // refused or evicted
  std::string reason;
  bool operator==(const Refused&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.code, self.reason); }
};

// New entries of the group's log, in order.
struct Log {
  std::vector<LogEntry> entries;
  bool operator==(const Log&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.entries); }
};

// To a waiting newcomer: connect to these members. Sent again when the membership changes. Answered
// by Prepared.
struct Prepare {
  std::uint64_t epoch = 0;
  std::vector<Member> members;
  bool operator==(const Prepare&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.epoch, self.members); }
};

// To members: all newcomers that may connect to them.
struct Expect {
  std::vector<Member> newcomers;
  bool ready = false;  // one of them can be admitted now
  bool operator==(const Expect&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.newcomers, self.ready); }
};

// A line for the log of a waiting user ("peer 1a2b3c4d has not called collective #7 for 10 s").
struct Notice {
  std::string text;
  bool operator==(const Notice&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.text); }
};

// -- links that the master relays

// Member to master: asks for relayed connections to an older member that it cannot reach, and to
// which the epoch allows a relayed link. Answered by a Relay to both ends for each stripe.
struct WantRelay {
  PeerId peer;
  std::uint32_t stripes = 1;
  bool operator==(const WantRelay&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.peer, self.stripes); }
};

// Master to both members: open another connection to the master and send OpenRelay with this token.
// The token is valid for this end only, for one connection within a few seconds.
struct Relay {
  PeerId peer;       // the other end
  RelayToken token;  // random
  bool operator==(const Relay&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.peer, self.token); }
};

// The only message on a connection to be relayed, unencrypted even in a run with a secret. Answered
// by Relayed once the other end has connected; otherwise the connection ends.
struct OpenRelay {
  RelayToken token;
  bool operator==(const OpenRelay&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.token); }
};

// All further bytes on this connection, in both directions, are between the two peers.
struct Relayed {
  bool operator==(const Relayed&) const = default;
  static void fields(auto&, auto&) {}
};

// -- questions before joining

// How an attempt to reach an address ended.
enum class Reached : std::uint8_t {
  not_tried,
  yes,
  no,
  busy,  // not tried: the master has too many questions open
};
constexpr unsigned enum_count(Reached) { return 4; }

// First message of a peer that asks whether it could join. Answered by Findings, at once if `port`
// is 0. Otherwise the master and some members first try to connect to that port at the sender's
// address. A connection may name a port once.
struct Inquiry {
  std::uint32_t group = 0;
  std::uint16_t port = 0;  // on which the sender listens; 0: no attempt to connect
  std::string software;
  bool operator==(const Inquiry&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.group, self.port, self.software); }
};

// Whether a peer could be reached, and if not, why.
struct Attempt {
  PeerId peer;  // the peer that tried
  Reached reached = Reached::not_tried;
  std::string reason;
  bool operator==(const Attempt&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.peer, self.reached, self.reason); }
};

struct Findings {
  std::string software;           // of the master
  std::string seen;               // the asking peer's address as the master sees it
  Attempt attempt;                // by the master
  std::vector<Attempt> attempts;  // by members
  std::vector<Member> members;    // some of the group's members
  std::uint32_t size = 0;         // how many members the group has
  bool relays = false;            // the master relays links that cannot be established otherwise
  bool operator==(const Findings&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.software, self.seen, self.attempt, self.attempts, self.members, self.size,
          self.relays);
  }
};

// Master to a member: try to connect to this address. Answered by Tried.
struct Try {
  std::uint64_t number = 0;
  Address address;
  bool operator==(const Try&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.number, self.address); }
};

struct Tried {
  std::uint64_t number = 0;
  bool reached = false;
  std::string reason;
  bool operator==(const Tried&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.number, self.reached, self.reason); }
};

// -- questions and commands of operators

// First message of a process that asks for the status of the run, and joins nothing. Answered by
// StatusParts, or by Refused.
struct AskStatus {
  bool operator==(const AskStatus&) const = default;
  static void fields(auto&, auto&) {}
};

// Answers AskStatus: the bytes of a RunStatus (wire/status.h), cut into messages of about
// kPartBytes.
struct StatusPart {
  std::vector<std::uint8_t> bytes;
  bool last = false;
  bool operator==(const StatusPart&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.bytes, self.last); }
};

enum class CommandKind : std::uint8_t {
  kick,              // removes the peer from its group
  drain,             // asks the peer to leave at its next admission point
  pause_admission,   // newcomers of groups that have started wait ...
  resume_admission,  // ... until this
};
constexpr unsigned enum_count(CommandKind) { return 4; }

// First message of a process that changes the run, and joins nothing. Answered by CommandResult, or
// by Refused.
struct Command {
  CommandKind kind = CommandKind::kick;
  std::string name;  // kick, drain: a peer's name, or an id, whole or brief
  bool operator==(const Command&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.kind, self.name); }
};

struct CommandResult {
  bool done = false;
  std::string text;  // what was done, or why nothing was
  bool operator==(const CommandResult&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.done, self.text); }
};

// Master to a peer: the operator wants it to leave at its next admission point. Its heartbeats
// confirm that.
struct Drain {
  bool operator==(const Drain&) const = default;
  static void fields(auto&, auto&) {}
};

// -- several masters: see docs/internals/several-masters.md

// Master to a peer that sent Join: this master serves no members of that group, or newcomers that
// wait for a run to begin must make way. The peer asks the next address. The connection ends.
struct NotServing {
  bool recovers = false;  // this master may serve the group soon
  bool operator==(const NotServing&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.recovers); }
};

// Before Join, at the first address: no other address serves the group, or may do so soon. Not
// answered.
struct MayFound {
  bool operator==(const MayFound&) const = default;
  static void fields(auto&, auto&) {}
};

// A master that takes over, to a peer on its side: follow no lower term than this message's.
// Answered by Promise.
struct AskPromise {
  bool operator==(const AskPromise&) const = default;
  static void fields(auto&, auto&) {}
};

// An epoch that a member has accepted and does not know to be decided.
struct Accepted {
  std::uint32_t term = 0;  // of the master that proposed it
  LogEntry entry;
  bool operator==(const Accepted&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.term, self.entry); }
};

// Answers AskPromise.
struct Promise {
  std::vector<Accepted> accepted;  // at most one
  bool operator==(const Promise&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.accepted); }
};

// Master to the members of the last decided epoch: accept this epoch as the next one. It is decided
// once a majority has. Answered by Accept.
struct Propose {
  LogEntry entry;
  bool operator==(const Propose&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.entry); }
};

// Answers Propose.
struct Accept {
  std::uint64_t ordinal = 0;  // of the entry
  bool operator==(const Accept&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.ordinal); }
};

// -- the envelope

// The index in this list is the type byte on the wire. Append only.
using Message =
    std::variant<Join, Rejoin, RequestAdmission, Prepared, EnterRound, OpReport, AbortRequest,
                 LinkReport, Blocked, Leave, Heartbeat, Welcome, Refused, Log, Prepare, Expect,
                 Notice, WithdrawAdmission, Neighbourhood, Measured, Inquiry, Findings, Try, Tried,
                 WantRelay, Relay, OpenRelay, Relayed, RequestLog, LogPart, AskStatus, StatusPart,
                 Command, CommandResult, Drain, NotServing, MayFound, AskPromise, Promise, Propose,
                 Accept>;

// The part of a frame's header that concerns the protocol.
struct Envelope {
  std::uint64_t run = 0;   // run id; 0 in a Join
  std::uint32_t term = 0;  // the master's term; peers follow only an equal or higher one
  // From a peer: last log entry applied. From the master: last log entry applied by all members.
  std::uint64_t ordinal = 0;
  bool operator==(const Envelope&) const = default;
};

inline constexpr std::uint32_t kMagic = 0x4c434350;  // "PCCL"
// magic 4, version 1, type 1, zero 2, length 4, term 4, run 8, ordinal 8
inline constexpr std::size_t kHeaderBytes = 32;
inline constexpr std::size_t kMaxFirstPayload = 1U << 20;  // until the peer has identified itself
inline constexpr std::size_t kMaxPayload = 1U << 24;
// Long lists are sent in messages of about this size, which is below every reader's limit.
inline constexpr std::size_t kPartBytes = 1U << 18;
// A larger buffer is freed once it is empty.
inline constexpr std::size_t kKeptBuffer = 1U << 18;

struct Frame {
  Envelope envelope;
  Message message;
  bool operator==(const Frame&) const = default;
};

[[nodiscard]] Bytes encode(const Envelope& envelope, const Message& message);

// Bytes of a value on the wire.
template <class T>
[[nodiscard]] std::size_t encoded_bytes(const T& value) {
  return encoded(value).size();
}

// Cuts a list into parts of at most kPartBytes each on the wire; a longer item is a part of its
// own.
template <class T>
[[nodiscard]] std::vector<std::vector<T>> in_parts(std::vector<T> items) {
  std::vector<std::vector<T>> parts;
  if (items.size() == 1) {
    parts.push_back(std::move(items));
    return parts;
  }
  std::size_t used = 0;
  for (T& item : items) {
    const std::size_t bytes = encoded_bytes(item);
    if (parts.empty() || used + bytes > kPartBytes) {
      parts.emplace_back();
      used = 0;
    }
    used += bytes;
    parts.back().push_back(std::move(item));
  }
  return parts;
}

// Cuts a byte stream into frames.
class FrameReader {
 public:
  explicit FrameReader(std::size_t max_payload = kMaxPayload) : max_payload_(max_payload) {}
  void limit(std::size_t max_payload) { max_payload_ = max_payload; }
  void feed(std::span<const std::uint8_t> bytes) {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  }
  // True with a frame in `frame`, false when more bytes are needed. refused: the stream is not
  // valid; the connection cannot be used any further.
  Result<bool> next(Frame& frame);
  // Bytes of an incomplete frame.
  [[nodiscard]] std::size_t held() const { return buffer_.size() - at_; }
  // Memory held for an incomplete frame; 0 if there is none, although a buffer may be kept.
  [[nodiscard]] std::size_t held_memory() const { return held() == 0 ? 0 : buffer_.capacity(); }

 private:
  Bytes buffer_;
  std::size_t at_ = 0;
  std::size_t max_payload_;
};

}  // namespace pccl::wire
