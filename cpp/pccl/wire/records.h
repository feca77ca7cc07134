// The parts of messages: keys, the group's record, the entries of its log.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/base/ids.h"
#include "pccl/wire/codec.h"

namespace pccl {
constexpr unsigned enum_count(Code) { return 20; }
}  // namespace pccl

namespace pccl::wire {

// Where a peer can be reached: a numeric address or a host name, and a port.
struct Address {
  std::string host;
  std::uint16_t port = 0;
  bool operator==(const Address&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.host, self.port); }
};

// -- keys

// Names one operation in all its attempts. `sequence` counts the calls with this tag since the
// admission; calls without a tag share one counter.
struct OpKey {
  std::uint64_t admission = 0;  // epoch of the last admission
  bool tagged = false;
  std::uint64_t tag = 0;
  std::uint64_t sequence = 0;
  auto operator<=>(const OpKey&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.admission, self.tagged, self.tag, self.sequence);
  }
};

// A sync takes up to four rounds: `sync_admit` admits newcomers, `sync` compares the states,
// `sync_detail` finds the entries that differ and their holders, and `sync_end` closes the sync
// when every receiver has everything.
enum class RoundKind : std::uint8_t {
  admit,
  peers_pending,
  barrier,
  sync_admit,
  sync,
  sync_detail,
  sync_end,
  optimize
};
constexpr unsigned enum_count(RoundKind) { return 8; }
[[nodiscard]] const char* name(RoundKind kind);

struct RoundKey {
  RoundKind kind = RoundKind::admit;
  std::uint64_t admission = 0;
  std::uint64_t sequence = 0;
  auto operator<=>(const RoundKey&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.kind, self.admission, self.sequence); }
};

using CallKey = std::variant<OpKey, RoundKey>;
// "collective #3", "collective #0 of tag 7". The signature says which collective it is.
[[nodiscard]] std::string describe(const OpKey& key);
[[nodiscard]] std::string describe(const RoundKey& key);  // "barrier #2"
[[nodiscard]] std::string describe(const CallKey& key);

// -- shared state

// An XXH3-128 hash.
struct Digest {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  auto operator<=>(const Digest&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.low, self.high); }
};

enum class SyncStrategy : std::uint8_t { enforce_popular, receive_only, send_only };
constexpr unsigned enum_count(SyncStrategy) { return 3; }

// A member's account of its state when it enters a sync.
struct SyncVote {
  bool owned = false;          // simple API: the library counts revisions; newcomers adopt entries
  bool has_revision = false;   // the caller named a revision
  std::uint64_t revision = 0;  // REQUIRES: has_revision
  SyncStrategy strategy = SyncStrategy::enforce_popular;
  Digest structure;                // names, kinds, shapes
  Digest content;                  // of the entries that must be equal
  Digest loose;                    // of the entries that only newcomers receive
  std::uint64_t member_since = 0;  // the admission that admitted it
  std::uint64_t worked_since = 0;  // the admission of its first committed operation; 0: none yet
  bool whole = true;   // it completed the previous sync; if not, it counts as a newcomer
  bool mixed = false;  // its state has parts of another one, and is never elected
  std::string flaw;    // why its state cannot be shared (there are no digests then); empty: it can
  bool operator==(const SyncVote&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.owned, self.has_revision, self.revision, self.strategy, self.structure, self.content,
          self.loose, self.member_since, self.worked_since, self.whole, self.mixed, self.flaw);
  }
};

// One named array or value of a state.
struct StateEntry {
  std::string name;  // unique in its state
  std::string kind;  // dtype of an array, or type of a value
  std::vector<std::uint64_t> shape;
  std::string containers;   // how to build missing containers around it
  std::uint64_t bytes = 0;  // size; part of the content; kind and shape imply it for arrays
  bool loose = false;       // members may differ in it; newcomers receive it
  std::string tie;          // the first entry by name in the same memory, if it is another one
  Digest content;
  bool operator==(const StateEntry&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.name, self.kind, self.shape, self.containers, self.bytes, self.loose, self.tie,
          self.content);
  }
};

struct SyncDetail {
  SyncVote vote;
  std::vector<StateEntry> entries;  // sorted by name
  bool operator==(const SyncDetail&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.vote, self.entries); }
};

// How a member's part of the transfer ended.
struct SyncEnd {
  Code code = Code::ok;  // ok; peer_lost: no source is left; other codes: it cannot use the state
  std::string reason;
  std::uint64_t revision = 0;  // the elected one
  Digest content;              // the elected one
  std::vector<PeerId> lost;    // peer_lost: its sources
  bool operator==(const SyncEnd&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.code, self.reason, self.revision, self.content, self.lost);
  }
};

// -- rates of links

// The round trip of a host that is far, in microseconds. Those of one room or one city take less.
inline constexpr std::uint32_t kFarRoundTrip = 5000;

// The known properties of the path from one peer to another. Integers, so that all readers of a
// table compute with the same numbers.
struct LinkRate {
  bool unreachable = false;                    // a connection was tried and failed; the rest is 0
  std::uint32_t kilobytes_per_s = 0;           // 1000 bytes each, of user data, one way; 0: unknown
  std::uint32_t rtt_us = 0;                    // 0: unknown
  std::uint32_t together_kilobytes_per_s = 0;  // while all paths were saturated; 0: unknown
  bool operator==(const LinkRate&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.unreachable, self.kilobytes_per_s, self.rtt_us, self.together_kilobytes_per_s);
  }
};

// The rate of all flows out of one peer together (they share its up-link), and of all flows into
// it. 0: unknown.
struct HostRate {
  std::uint32_t up_kilobytes_per_s = 0;
  std::uint32_t down_kilobytes_per_s = 0;
  bool operator==(const HostRate&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.up_kilobytes_per_s, self.down_kilobytes_per_s);
  }
};

struct MeasuredLink {
  PeerId to;
  LinkRate rate;  // from the reporting peer to that one
  bool operator==(const MeasuredLink&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.to, self.rate); }
};

// One member's row of the table. A rate of 0 leaves the known one unchanged.
struct Measurements {
  std::vector<MeasuredLink> links;
  HostRate total;  // all its flows at the same time
  bool operator==(const Measurements&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.links, self.total); }
};

// All rows, by rank. Both lists are empty, or for n ranks `hosts` has n items and `links` has n *
// n, at [from * n + to].
struct RateTable {
  std::vector<HostRate> hosts;
  std::vector<LinkRate> links;
  bool operator==(const RateTable&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.hosts, self.links); }
};

struct Nothing {
  bool operator==(const Nothing&) const = default;
  static void fields(auto&, auto&) {}
};

// A member at an admission point.
struct AdmissionPoint {
  bool measures = false;  // it will measure its links if the outcome asks for it
  bool operator==(const AdmissionPoint&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.measures); }
};

// The argument with which a member enters a round.
using RoundPayload =
    std::variant<Nothing, SyncVote, SyncDetail, SyncEnd, Measurements, AdmissionPoint>;

// A round that a member has entered.
struct RoundEntry {
  RoundKey key;
  RoundPayload payload;
  bool operator==(const RoundEntry&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.key, self.payload); }
};

enum class SyncStep : std::uint8_t {
  none,      // the round is not one of a sync
  detail,    // states differ: list the entries in `sync_detail`
  transfer,  // receivers fetch from holders
  again,     // start over with `sync`
  done,      // all members hold the state
};
constexpr unsigned enum_count(SyncStep) { return 5; }

// The entries in which a standing member differed from the elected state.
struct Divergence {
  PeerId peer;
  std::vector<std::string> names;  // the first few
  bool operator==(const Divergence&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.peer, self.names); }
};

// The master's election in a sync.
struct SyncDecision {
  SyncStep step = SyncStep::none;
  std::uint64_t revision = 0;
  Digest content;
  std::vector<PeerId> holders;    // have the elected state; loose entries are the first holder's
  std::vector<PeerId> receivers;  // get the entries that differ
  std::vector<PeerId> newcomers;  // the receivers that get loose entries too
  std::vector<Divergence> diverged;
  bool operator==(const SyncDecision&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.step, self.revision, self.content, self.holders, self.receivers, self.newcomers,
          self.diverged);
  }
};

// The run's shared state after the latest sync.
struct StateRecord {
  bool exists = false;
  std::uint64_t revision = 0;
  Digest content;
  std::vector<PeerId> holders;  // the members that took part in that sync
  bool operator==(const StateRecord&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.exists, self.revision, self.content, self.holders);
  }
};

// -- operations

// Must be equal on all members of an operation: a hash, and a text for errors.
struct Signature {
  std::uint64_t hash = 0;
  std::string text;  // "1000 float32, sum"
  bool operator==(const Signature&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.hash, self.text); }
};

enum class OpPhase : std::uint8_t { entered, done };
constexpr unsigned enum_count(OpPhase) { return 2; }

// One member's progress in one operation. `done` implies entered.
struct OpState {
  OpKey key;
  std::uint64_t attempt = 0;  // the epoch in which it runs
  OpPhase phase = OpPhase::entered;
  bool rerun = false;  // it runs again when a member is lost; otherwise it fails
  Signature signature;
  bool operator==(const OpState&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.key, self.attempt, self.phase, self.rerun, self.signature);
  }
};

// -- the plan

// collective/schedule.h explains each.
enum class ScheduleKind : std::uint8_t { ring, direct, host_ring, host_direct, regional };
constexpr unsigned enum_count(ScheduleKind) { return 5; }

// Operations of up to `max_bytes` bytes run `kind`, divided by `shares` (one per rank).
struct SizeClass {
  std::uint64_t max_bytes = 0;
  ScheduleKind kind = ScheduleKind::ring;
  std::vector<std::uint32_t> shares;
  bool operator==(const SizeClass&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.max_bytes, self.kind, self.shares); }
};

// How the members of an epoch reduce. Computed by the master alone, in integers.
struct Plan {
  std::uint32_t segment_bytes = 0;
  std::vector<std::uint32_t> order;  // ring: order[position] = rank
  std::vector<SizeClass> classes;    // ascending max_bytes; the last one has no limit
  std::vector<std::uint32_t> hosts;  // by rank; ranks with the same number share memory
  // By rank; ranks with the same number reduce among each other first. Empty unless a class is
  // regional.
  std::vector<std::uint32_t> regions;
  bool operator==(const Plan&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.segment_bytes, self.order, self.classes, self.hosts, self.regions);
  }
};

// -- the group's log

struct Member {
  PeerId id;
  std::uint64_t joined = 0;  // join ordinal: grows with every join, never reused in a run
  std::vector<Address> addresses;
  MemoryKey memory_key;   // a peer that has it may ask for shared memory; zero: none is shared
  std::string replica{};  // its peers, one in each group, enter and leave together; empty: none
  Seal seal{};            // of the ticket that the member presents when it returns
  std::string name{};     // for users; see shown_name
  std::uint32_t min_peers = 1;  // how many it wanted its group to start with; 1: it came later
  bool operator==(const Member&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.id, self.joined, self.addresses, self.memory_key, self.replica, self.seal, self.name,
          self.min_peers);
  }
};

// A member in messages to users: "trainer-3"; "trainer-3/1a2b3c4d" where another one of
// `members` has the same name; "1a2b3c4d" for a peer that has no name or is not in the list.
[[nodiscard]] std::string shown_name(const std::vector<Member>& members, const PeerId& id);
// The same. `alone`: no other peer around has this name.
[[nodiscard]] std::string shown_name(const std::string& name, const PeerId& id, bool alone);

struct Departure {
  PeerId id;
  std::string reason;  // "left", "connection lost", ...
  std::string name{};  // its shown_name before
  bool operator==(const Departure&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.id, self.reason, self.name); }
};

// How often a peer gives signs of life, and the silence after which it takes another one for dead.
// The defaults go with everything.
struct Heartbeats {
  std::uint32_t interval_ms = 0;
  std::uint32_t timeout_ms = 0xffffffff;
  bool operator==(const Heartbeats&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.interval_ms, self.timeout_ms); }
};

// How long a member that has entered a call gives the others. Once a quorum has entered it, and the
// grace is over, the master evicts those that have not, if all that have are ready for that.
struct Patience {
  std::uint16_t quorum = 0;  // of the members, in thousandths; 0: it waits for all
  std::uint32_t grace_ms = 0;
  bool operator==(const Patience&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.quorum, self.grace_ms); }
};

// The work of one peer since it joined.
struct WorkDone {
  std::uint64_t operations = 0;      // that were committed
  std::uint64_t reduced_bytes = 0;   // of the peer's arrays in these
  std::uint64_t sent_bytes = 0;      // by operations and syncs, however they ended
  std::uint64_t received_bytes = 0;  // likewise
  bool operator==(const WorkDone&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.operations, self.reduced_bytes, self.sent_bytes, self.received_bytes);
  }
};

// Sizes over all groups, for get_attribute.
struct Census {
  std::uint32_t members = 0;
  std::uint32_t groups = 0;
  std::uint32_t largest_group = 0;
  bool operator==(const Census&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.members, self.groups, self.largest_group);
  }
};

// Why an epoch began. `loss`: a member departed, or only a link broke; operations in flight are
// aborted.
enum class Cause : std::uint8_t { admission, loss, plan };
constexpr unsigned enum_count(Cause) { return 3; }

// Two ranks, first < second.
struct RankPair {
  std::uint32_t first = 0;
  std::uint32_t second = 0;
  bool operator==(const RankPair&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.first, self.second); }
};

constexpr std::size_t kMaxRelayed = 64;  // pairs of members that the master relays, per group

// A group's membership and plan. Every record is complete, so that each member can report it to a
// new master.
struct EpochRecord {
  std::uint64_t epoch = 0;
  Cause cause = Cause::admission;
  std::uint64_t admission = 0;    // the last epoch with cause admission
  std::uint64_t abort_floor = 0;  // attempts of earlier epochs are void
  std::vector<Member> members;    // in rank order
  Plan plan;
  Census census;
  std::vector<Departure> departures;  // since the previous epoch
  std::vector<OpKey> aborted;         // operations that this loss ended (policy abort)
  bool syncing = false;               // admission: by the first round of a sync
  StateRecord state;
  RateTable rates;  // the plan was chosen from these; empty: nothing is measured
  std::uint32_t ranks_per_replica = 0;  // 0: members belong to no replicas
  std::uint64_t points = 0;             // replicas: admission points passed, equal in all groups
  // The last of these points is a sync that has not succeeded and may be repeated.
  bool point_open = false;
  // Pairs of members that could not connect, ascending, at most kMaxRelayed. The master relays a
  // link between them where one is needed.
  std::vector<RankPair> relayed;
  bool operator==(const EpochRecord&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.epoch, self.cause, self.admission, self.abort_floor, self.members, self.plan,
          self.census, self.departures, self.aborted, self.syncing, self.state, self.rates,
          self.ranks_per_replica, self.points, self.point_open, self.relayed);
  }
};

// refused: record.relayed breaks one of the rules above; names the rule.
[[nodiscard]] Status check_relays(const EpochRecord& record);

// The number of the admission point that a round of this kind passes next.
[[nodiscard]] std::uint64_t next_point(const EpochRecord& record, RoundKind kind);

// The master's decision on an operation.
struct Verdict {
  OpKey key;
  std::uint64_t attempt = 0;
  Code code = Code::ok;  // ok: commit
  // A commit: the next admission point needs its round, for newcomers or a measurement.
  bool admission_due = false;
  PeerId culprit;
  std::string reason;
  std::string waiting;  // deadlock only
  bool operator==(const Verdict&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.key, self.attempt, self.code, self.admission_due, self.culprit, self.reason,
          self.waiting);
  }
};

// The master's decision on a round. A round that admits newcomers is decided by an EpochRecord
// instead.
struct Outcome {
  RoundKey key;
  Code code = Code::ok;
  // peers_pending: 1 when newcomers wait. admit, sync_admit: 1 when the members should measure.
  std::uint64_t answer = 0;
  Census census;
  PeerId culprit;
  std::string reason;
  std::string waiting;
  SyncDecision sync;  // for rounds of a sync
  bool operator==(const Outcome&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.key, self.code, self.answer, self.census, self.culprit, self.reason, self.waiting,
          self.sync);
  }
};

// Whether the end of a round changes the record of its epoch. apply() makes the change.
[[nodiscard]] bool changes_record(const Outcome& outcome, const EpochRecord& record);
void apply(const Outcome& outcome, EpochRecord& record);

// One entry of the group's history, which all members see in the same order. Ordinals are
// consecutive.
struct LogEntry {
  std::uint64_t ordinal = 0;
  std::variant<EpochRecord, Verdict, Outcome> what;
  bool operator==(const LogEntry&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.ordinal, self.what); }
};

// The state of a link as one end sees it.
enum class LinkState : std::uint8_t {
  broken,       // it was up and its connection ended
  unreachable,  // it could not be (re-)established in time
  silent,       // nothing was received on it for the heartbeat timeout
  mended,       // it works again
  relayed,      // it works again, through the master
};
constexpr unsigned enum_count(LinkState) { return 5; }

}  // namespace pccl::wire
