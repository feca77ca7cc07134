// The control protocol: every message between a peer and the master. docs/protocol.md has the
// table.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "pccl/wire/records.h"

namespace pccl::wire {

// ---- peer -> master
// -----------------------------------------------------------------------------------------------

// First message of a new peer. Answered by Welcome or Refused.
struct Join {
  PeerId id;
  std::uint32_t group = 0;      // peers reduce only within a group
  std::uint32_t min_peers = 1;  // until the group has started: wait for that many
  bool waiting =
      false;  // this peer waits to be a member now (else RequestAdmission follows some day)
  bool start_only =
      false;  // ... but only as a founder: if the group has started, it does not wait yet
  std::vector<Address> addresses;
  std::string software;  // "pccl 0.1.0", for logs and refusals
  std::uint32_t order =
      0xffffffff;       // founders of a group are ranked by this first, then by joining
  PeerId word;          // Member::word
  std::string replica;  // Member::replica
  std::uint32_t ranks_per_replica = 0;  // it has a peer in each of the groups 0 to this
  PeerId ticket;                        // its own secret; Member::seal is made from it
  bool operator==(const Join&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.id, self.group, self.min_peers, self.waiting, self.start_only, self.addresses,
          self.software, self.order, self.word, self.replica, self.ranks_per_replica, self.ticket);
  }
};

// First message on a re-dialled control connection of a member. Answered by Welcome and the log's
// missing entries, by RequestLog from a master that knows less than this member, or by Refused when
// the peer is no member any more. After the Welcome the member says its open calls again.
struct Rejoin {
  PeerId id;
  std::uint32_t group = 0;
  EpochRecord record;         // of the last epoch that it knows
  std::uint64_t applied = 0;  // ordinal of the last log entry applied
  PeerId ticket{};            // the Join's
  bool operator==(const Rejoin&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.id, self.group, self.record, self.applied, self.ticket);
  }
};

// Answers RequestLog: entries that are not known to be collected by all, up to Rejoin::applied, in
// order; as many messages as it takes (kPartBytes). Answered by Welcome after the last one.
struct LogPart {
  std::vector<LogEntry> entries;
  bool last = false;
  bool operator==(const LogPart&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.entries, self.last);
  }
};

// A newcomer's first collective call: it waits to be let in. Answered by Prepare, in the end by an
// epoch.
struct RequestAdmission {
  bool operator==(const RequestAdmission&) const = default;
  template <class Self, class Visitor>
  static void fields(Self&, Visitor&) {}
};

// A newcomer's call came to its deadline while it waited to be let in: it does not wait any more.
// Not answered; it may be a member already.
struct WithdrawAdmission {
  bool operator==(const WithdrawAdmission&) const = default;
  template <class Self, class Visitor>
  static void fields(Self&, Visitor&) {}
};

// A newcomer's links to all members of `epoch` are up, but for some that cannot be made (answer to
// Prepare; again when that changes).
struct Prepared {
  std::uint64_t epoch = 0;
  std::vector<PeerId> without;  // the other ends of these; LinkReports say why
  bool operator==(const Prepared&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.epoch, self.without);
  }
};

// A member enters a round. Answered by an Outcome, or by the epoch of an admission.
struct EnterRound {
  RoundEntry entry;
  bool operator==(const EnterRound&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.entry);
  }
};

// A member's operations moved on. Answered by a Verdict each, in the end.
struct OpReport {
  std::vector<OpState> states;
  bool operator==(const OpReport&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.states);
  }
};

// A member gives up on a call (deadline, Ctrl-C). Answered by the call's verdict, which may still
// be commit.
struct AbortRequest {
  CallKey key;
  // timeout, interrupted, or peer_lost: the members that are left cannot complete it
  Code code = Code::timeout;
  PeerId lost{};  // peer_lost: the member that it cannot do without, where there is one
  bool operator==(const AbortRequest&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.key, self.code, self.lost);
  }
};

// A member (or a newcomer that prepares) says that a link does not work. Never answered directly.
struct LinkReport {
  PeerId peer;
  LinkState state = LinkState::broken;
  std::uint64_t epoch = 0;
  std::string reason;
  bool operator==(const LinkReport&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.peer, self.state, self.epoch, self.reason);
  }
};

// Where a member's threads have been blocked for a second or more. No waits: the report before is
// taken back.
struct Blocked {
  std::vector<CallKey> waits;
  bool multi_threaded = false;  // more than one thread has used the communicator
  bool outside = false;         // one of them is outside it now
  bool moving = false;          // links moved bytes since the report before
  bool operator==(const Blocked&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.waits, self.multi_threaded, self.outside, self.moving);
  }
};

// The peers that this one shares memory with now; the whole list each time. A plan lets ranks
// reduce in memory once both sides of every pair have said so.
struct Neighbourhood {
  std::vector<PeerId> peers;
  std::uint32_t pending = 0;  // not known yet: attempts under way
  bool operator==(const Neighbourhood&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.peers, self.pending);
  }
};

// What a member's transfers have shown since it said so before; unlike a row that is brought to a
// round of optimize_topology, nobody waits for it. Not answered; an epoch follows when another plan
// would be clearly faster.
struct Measured {
  Measurements row;
  bool operator==(const Measured&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.row);
  }
};

// A peer goes, in good order. Not answered.
struct Leave {
  std::string reason;
  bool operator==(const Leave&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.reason);
  }
};

// Both ways, every heartbeat interval. The header's ordinal is what matters.
struct Heartbeat {
  bool operator==(const Heartbeat&) const = default;
  template <class Self, class Visitor>
  static void fields(Self&, Visitor&) {}
};

// ---- master -> peer
// -----------------------------------------------------------------------------------------------

// Answers Join and Rejoin.
struct Welcome {
  std::uint64_t joined = 0;       // this peer's join ordinal
  bool group_started = false;     // at a Join: the group has members already
  std::uint32_t waiting_for = 0;  // peers still missing until min_peers are there
  std::string seen;               // the address the master sees this peer at
  bool operator==(const Welcome&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.joined, self.group_started, self.waiting_for, self.seen);
  }
};

// To a member that came back and has applied more of the log than this master has. Answered by
// LogPart.
struct RequestLog {
  bool operator==(const RequestLog&) const = default;
  template <class Self, class Visitor>
  static void fields(Self&, Visitor&) {}
};

// The peer is not let in, or is removed; the connection ends.
struct Refused {
  Code code = Code::refused;  // refused or evicted
  std::string reason;
  bool operator==(const Refused&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.code, self.reason);
  }
};

// New entries of the group's log, in order.
struct Log {
  std::vector<LogEntry> entries;
  bool operator==(const Log&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.entries);
  }
};

// To a waiting newcomer: dial these members. Sent again whenever the membership changes. Answered
// by Prepared.
struct Prepare {
  std::uint64_t epoch = 0;
  std::vector<Member> members;
  bool operator==(const Prepare&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.epoch, self.members);
  }
};

// To members: these newcomers may dial you. The whole list each time.
struct Expect {
  std::vector<Member> newcomers;
  bool ready = false;  // one of them could enter now
  bool operator==(const Expect&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.newcomers, self.ready);
  }
};

// A line for the log of a user who waits ("peer 1a2b3c4d has not called collective #7 for 10 s").
struct Notice {
  std::string text;
  bool operator==(const Notice&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.text);
  }
};

// ---- links that the master relays
// ----------------------------------------------------------------------------------------

// Member to master: no connection to that older member comes about, and the epoch says that its
// link may go through the master. Answered by Relay, to both ends, for each stripe.
struct WantRelay {
  PeerId peer;
  std::uint32_t stripes = 1;
  bool operator==(const WantRelay&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.peer, self.stripes);
  }
};

// Master to both members: connect to the master once more, and say OpenRelay with this token, which
// is this end's alone, and good for one connection within a few seconds.
struct Relay {
  PeerId peer;   // at the other end
  PeerId token;  // random
  bool operator==(const Relay&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.peer, self.token);
  }
};

// The only message on a connection that is to be relayed; in the clear, also in a run with a
// secret. Answered by Relayed when the other end has come, else the connection ends.
struct OpenRelay {
  PeerId token;
  bool operator==(const OpenRelay&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.token);
  }
};

// All that follows on this connection, both ways, is between the two peers.
struct Relayed {
  bool operator==(const Relayed&) const = default;
  template <class Self, class Visitor>
  static void fields(Self&, Visitor&) {}
};

// ---- who asks before it joins
// -----------------------------------------------------------------------------------

// How an attempt to reach an address ended.
enum class Reached : std::uint8_t {
  not_tried,
  yes,
  no,
  busy,  // too many others ask at the moment
};
constexpr unsigned enum_count(Reached) { return 4; }

// First message of somebody who asks whether it could join. Answered by Findings; with a port only
// once per connection, after the master and some members have tried to connect to the address that
// the question comes from.
struct Inquiry {
  std::uint32_t group = 0;
  std::uint16_t port = 0;  // where it listens; 0: the answer comes at once
  std::string software;
  bool operator==(const Inquiry&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.group, self.port, self.software);
  }
};

// Whether a peer could be reached, and why not.
struct Attempt {
  PeerId peer;  // that tried
  Reached reached = Reached::not_tried;
  std::string reason;
  bool operator==(const Attempt&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.peer, self.reached, self.reason);
  }
};

struct Findings {
  std::string software;           // the master's
  std::string seen;               // the address that it sees the other one at
  Attempt attempt;                // its own
  std::vector<Attempt> attempts;  // of members
  std::vector<Member> members;    // of the group; some of them
  std::uint32_t size = 0;         // how many there are
  bool relays = false;            // the master relays links that cannot be made otherwise
  bool operator==(const Findings&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.software, self.seen, self.attempt, self.attempts, self.members, self.size,
          self.relays);
  }
};

// Master to a member: try to connect there. Answered by Tried.
struct Try {
  std::uint64_t number = 0;
  Address address;
  bool operator==(const Try&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.number, self.address);
  }
};

struct Tried {
  std::uint64_t number = 0;
  bool reached = false;
  std::string reason;
  bool operator==(const Tried&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.number, self.reached, self.reason);
  }
};

// ---- the envelope
// -------------------------------------------------------------------------------------------------

// The index in this list is the type byte on the wire: append only.
using Message =
    std::variant<Join, Rejoin, RequestAdmission, Prepared, EnterRound, OpReport, AbortRequest,
                 LinkReport, Blocked, Leave, Heartbeat, Welcome, Refused, Log, Prepare, Expect,
                 Notice, WithdrawAdmission, Neighbourhood, Measured, Inquiry, Findings, Try, Tried,
                 WantRelay, Relay, OpenRelay, Relayed, RequestLog, LogPart>;

// What every control frame starts with.
struct Envelope {
  std::uint64_t run = 0;   // run id; 0 in a Join
  std::uint32_t term = 0;  // the master's term; peers follow only an equal or higher one
  std::uint64_t ordinal =
      0;  // from a peer: last log entry applied; from the master: last one collected by all
  bool operator==(const Envelope&) const = default;
};

inline constexpr std::uint32_t kMagic = 0x4c434350;  // "PCCL"
inline constexpr std::size_t kHeaderBytes =
    32;  // magic 4, version 1, type 1, zero 2, length 4, term 4, run 8, ordinal 8
inline constexpr std::size_t kMaxFirstPayload = 1U << 20;  // until the peer is known
inline constexpr std::size_t kMaxPayload = 1U << 24;
// Lists that may be long go in messages of about this size: below any reader's limit.
inline constexpr std::size_t kPartBytes = 1U << 18;
// A buffer that was needed for more than this once is not kept for the next time.
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
  Bytes bytes;
  Writer writer(bytes);
  writer(value);
  return bytes.size();
}

// Cuts a list into runs of at most kPartBytes each on the wire; an item that is longer is alone.
template <class T>
[[nodiscard]] std::vector<std::vector<T>> in_parts(std::vector<T> items) {
  std::vector<std::vector<T>> parts;
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

// Cuts a byte stream into frames. Feed bytes as they come; `next` yields a frame, nothing yet, or
// why the stream is not one of ours (then the connection is of no more use).
class FrameReader {
 public:
  explicit FrameReader(std::size_t max_payload = kMaxPayload) : max_payload_(max_payload) {}
  void limit(std::size_t max_payload) { max_payload_ = max_payload; }
  void feed(std::span<const std::uint8_t> bytes) {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  }
  // True with a frame in `frame`, false when more bytes are needed.
  Result<bool> next(Frame& frame);
  // Bytes that are no whole frame yet.
  [[nodiscard]] std::size_t held() const { return buffer_.size() - at_; }
  // What they cost, if there are any. (A buffer that waits for the next message is not meant.)
  [[nodiscard]] std::size_t held_memory() const { return held() == 0 ? 0 : buffer_.capacity(); }

 private:
  Bytes buffer_;
  std::size_t at_ = 0;
  std::size_t max_payload_;
};

}  // namespace pccl::wire
