// What messages are made of: keys, the group's record, the entries of its log.
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

// Where a peer can be reached: a numeric address or host name, and a port.
struct Address {
  std::string host;
  std::uint16_t port = 0;
  bool operator==(const Address&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.host, self.port);
  }
};

// ---- keys
// ---------------------------------------------------------------------------------------------------------

// Names one operation for all its attempts. Sequence counts the calls of that tag (untagged calls
// share one counter) since the admission.
struct OpKey {
  std::uint64_t admission = 0;  // epoch of the last admission
  bool tagged = false;
  std::uint64_t tag = 0;
  std::uint64_t sequence = 0;
  auto operator<=>(const OpKey&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.admission, self.tagged, self.tag, self.sequence);
  }
};

// A sync is up to four rounds: `sync_admit` lets newcomers in, `sync` compares, `sync_detail` finds
// what differs and who has it, `sync_end` closes it when every receiver has everything.
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
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.kind, self.admission, self.sequence);
  }
};

using CallKey = std::variant<OpKey, RoundKey>;
// "collective #3", "collective #0 of tag 7": whether it reduces or gathers is in its signature.
[[nodiscard]] std::string describe(const OpKey& key);
[[nodiscard]] std::string describe(const RoundKey& key);  // "barrier #2"
[[nodiscard]] std::string describe(const CallKey& key);

// ---- shared state
// -------------------------------------------------------------------------------------------------

// XXH3-128 of something.
struct Digest {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  auto operator<=>(const Digest&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.low, self.high);
  }
};

enum class SyncStrategy : std::uint8_t { enforce_popular, receive_only, send_only };
constexpr unsigned enum_count(SyncStrategy) { return 3; }

// What a member says of its state when it enters a sync.
struct SyncVote {
  bool owned = false;          // level 2: the library counts revisions; newcomers adopt entries
  bool has_revision = false;   // the caller named one
  std::uint64_t revision = 0;  // REQUIRES: has_revision
  SyncStrategy strategy = SyncStrategy::enforce_popular;
  Digest structure;                // names, kinds, shapes
  Digest content;                  // of the entries that must be equal
  Digest loose;                    // of the entries that only newcomers receive
  std::uint64_t member_since = 0;  // the admission that let it in
  std::uint64_t worked_since = 0;  // the admission of its first committed operation; 0: none yet
  bool whole = true;  // it took over the state of the sync before; else it counts as a newcomer
  std::string flaw;   // why its state cannot be shared; empty: it can. Else there are no digests
  bool operator==(const SyncVote&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.owned, self.has_revision, self.revision, self.strategy, self.structure, self.content,
          self.loose, self.member_since, self.worked_since, self.whole, self.flaw);
  }
};

// One named array or value of a state.
struct StateEntry {
  std::string name;  // unique in its state
  std::string kind;  // dtype, or what kind of value
  std::vector<std::uint64_t> shape;
  std::string containers;   // how to build the containers around it where they are missing
  std::uint64_t bytes = 0;  // of values, part of the content; of arrays it follows from the shape
  bool loose = false;       // members may differ; newcomers receive it
  std::string tie;  // the first entry by name that is the same memory; empty: none before it
  Digest content;
  bool operator==(const StateEntry&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.name, self.kind, self.shape, self.containers, self.bytes, self.loose, self.tie,
          self.content);
  }
};

struct SyncDetail {
  SyncVote vote;
  std::vector<StateEntry> entries;  // sorted by name
  bool operator==(const SyncDetail&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.vote, self.entries);
  }
};

// How a member's part of the transfer went.
struct SyncEnd {
  Code code = Code::ok;  // ok; peer_lost: no source gives it the rest; else it cannot take it
  std::string reason;
  std::uint64_t revision = 0;  // what was elected
  Digest content;
  std::vector<PeerId> lost;  // peer_lost: its sources
  bool operator==(const SyncEnd&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.code, self.reason, self.revision, self.content, self.lost);
  }
};

// ---- how fast links are
// ------------------------------------------------------------------------------------------------

// What is known of the way from one peer to another. Integers, so that everybody who reads a table
// computes with the same numbers.
struct LinkRate {
  bool unreachable = false;           // tried, and no connection came about; the rest is 0
  std::uint32_t kilobytes_per_s = 0;  // 1000 bytes each, of user data, one way; 0: not known
  std::uint32_t rtt_us = 0;           // there and back; 0: not known
  std::uint32_t together_kilobytes_per_s =
      0;  // while all ways carried all they could; 0: not known
  bool operator==(const LinkRate&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.unreachable, self.kilobytes_per_s, self.rtt_us, self.together_kilobytes_per_s);
  }
};

// What all flows out of one peer, or into it, carry together: they share its up-link and its
// down-link. 0: not known.
struct HostRate {
  std::uint32_t up_kilobytes_per_s = 0;
  std::uint32_t down_kilobytes_per_s = 0;
  bool operator==(const HostRate&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.up_kilobytes_per_s, self.down_kilobytes_per_s);
  }
};

struct MeasuredLink {
  PeerId to;
  LinkRate rate;  // from the peer that says so, to that one
  bool operator==(const MeasuredLink&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.to, self.rate);
  }
};

// One member's row. What it does not say stays as it was known before; an empty one says nothing.
struct Measurements {
  std::vector<MeasuredLink> links;
  HostRate total;  // with all its flows at once
  bool operator==(const Measurements&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.links, self.total);
  }
};

// All rows, by rank. Both lists are empty, or `hosts` has n items and `links` n * n: [from * n +
// to].
struct RateTable {
  std::vector<HostRate> hosts;
  std::vector<LinkRate> links;
  bool operator==(const RateTable&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.hosts, self.links);
  }
};

struct Nothing {
  bool operator==(const Nothing&) const = default;
  template <class Self, class Visitor>
  static void fields(Self&, Visitor&) {}
};

// At an admission point.
struct AdmissionPoint {
  bool measures = false;  // it goes on to measure if the outcome says so
  bool operator==(const AdmissionPoint&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.measures);
  }
};

// What a member enters a round with.
using RoundPayload =
    std::variant<Nothing, SyncVote, SyncDetail, SyncEnd, Measurements, AdmissionPoint>;

// A round that a member has entered.
struct RoundEntry {
  RoundKey key;
  RoundPayload payload;
  bool operator==(const RoundEntry&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.key, self.payload);
  }
};

enum class SyncStep : std::uint8_t {
  none,      // not the end of a sync round
  detail,    // states differ: tell the entries
  transfer,  // receivers fetch from holders
  again,     // start over with `sync`
  done,      // all hold the state
};
constexpr unsigned enum_count(SyncStep) { return 5; }

// Which entries of a standing member were not as the elected ones.
struct Divergence {
  PeerId peer;
  std::vector<std::string> names;  // the first few
  bool operator==(const Divergence&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.peer, self.names);
  }
};

// What the master elected.
struct SyncDecision {
  SyncStep step = SyncStep::none;
  std::uint64_t revision = 0;
  Digest content;
  std::vector<PeerId> holders;    // have it; the first one's loose entries count
  std::vector<PeerId> receivers;  // get what differs
  std::vector<PeerId> newcomers;  // those of them that get loose entries too
  std::vector<Divergence> diverged;
  bool operator==(const SyncDecision&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.step, self.revision, self.content, self.holders, self.receivers, self.newcomers,
          self.diverged);
  }
};

// The run's shared state, as the latest sync left it.
struct StateRecord {
  bool exists = false;
  std::uint64_t revision = 0;
  Digest content;
  std::vector<PeerId> holders;  // members that took part in it
  bool operator==(const StateRecord&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.exists, self.revision, self.content, self.holders);
  }
};

// ---- operations
// ---------------------------------------------------------------------------------------------------

// What must be equal on all members of an operation: a hash of everything, and a sentence for
// errors.
struct Signature {
  std::uint64_t hash = 0;
  std::string text;  // "1000 float32, sum"
  bool operator==(const Signature&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.hash, self.text);
  }
};

enum class OpPhase : std::uint8_t { entered, done };
constexpr unsigned enum_count(OpPhase) { return 2; }

// One member's standing in one operation. `done` implies entered.
struct OpState {
  OpKey key;
  std::uint64_t attempt = 0;  // epoch in which it runs
  OpPhase phase = OpPhase::entered;
  bool rerun = false;  // runs again when a member is lost; else it fails
  Signature signature;
  bool operator==(const OpState&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.key, self.attempt, self.phase, self.rerun, self.signature);
  }
};

// ---- the plan
// -----------------------------------------------------------------------------------------------------

// collective/schedule.h says what they are.
enum class ScheduleKind : std::uint8_t { ring, direct, host_ring, host_direct, regional };
constexpr unsigned enum_count(ScheduleKind) { return 5; }

// Operations of up to `max_bytes` bytes run `kind`, cut by `shares` (one per rank).
struct SizeClass {
  std::uint64_t max_bytes = 0;
  ScheduleKind kind = ScheduleKind::ring;
  std::vector<std::uint32_t> shares;
  bool operator==(const SizeClass&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.max_bytes, self.kind, self.shares);
  }
};

// How the members of one epoch reduce. Computed by the master alone, in integers.
struct Plan {
  std::uint32_t segment_bytes = 0;
  std::vector<std::uint32_t> order;  // ring: order[position] = rank
  std::vector<SizeClass> classes;    // ascending max_bytes; the last one takes everything
  std::vector<std::uint32_t> hosts;  // by rank: ranks with the same number share memory
  // By rank: those with the same number are near each other. Empty where no class is regional.
  std::vector<std::uint32_t> regions;
  bool operator==(const Plan&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.segment_bytes, self.order, self.classes, self.hosts, self.regions);
  }
};

// ---- the group's log
// ----------------------------------------------------------------------------------------------

struct Member {
  PeerId id;
  std::uint64_t joined = 0;  // join ordinal: grows with every join, never reused in a run
  std::vector<Address> addresses;
  PeerId word;            // who knows it may ask for shared memory; zero: shares none
  std::string replica{};  // its peers, one in each group, come and go together; empty: none
  PeerId seal{};          // of the ticket that it shows when it comes back
  bool operator==(const Member&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.id, self.joined, self.addresses, self.word, self.replica, self.seal);
  }
};

struct Departure {
  PeerId id;
  std::string reason;  // "left", "connection lost", ...
  bool operator==(const Departure&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.id, self.reason);
  }
};

// Sizes over all groups, for get_attribute.
struct Census {
  std::uint32_t members = 0;
  std::uint32_t groups = 0;
  std::uint32_t largest_group = 0;
  bool operator==(const Census&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.members, self.groups, self.largest_group);
  }
};

// Why an epoch began. `loss`: operations in flight are aborted, also when only a link broke and
// nobody departed.
enum class Cause : std::uint8_t { admission, loss, plan };
constexpr unsigned enum_count(Cause) { return 3; }

// Two ranks, first < second.
struct RankPair {
  std::uint32_t first = 0;
  std::uint32_t second = 0;
  bool operator==(const RankPair&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.first, self.second);
  }
};

constexpr std::size_t kMaxRelayed = 64;  // pairs of a group that the master relays

// A group's membership and plan: the whole record, so that every peer can report it to a new
// master.
struct EpochRecord {
  std::uint64_t epoch = 0;
  Cause cause = Cause::admission;
  std::uint64_t admission = 0;    // the last epoch with cause admission
  std::uint64_t abort_floor = 0;  // attempts of earlier epochs are void
  std::vector<Member> members;    // in rank order
  Plan plan;
  Census census;
  std::vector<Departure> departures;  // who left since the epoch before
  std::vector<OpKey> aborted;         // operations this loss ended for good (policy abort)
  bool syncing = false;               // admission: it was the first round of a sync
  StateRecord state;
  RateTable rates;                      // what the plan was chosen from; empty: nothing is measured
  std::uint32_t ranks_per_replica = 0;  // 0: members belong to no replicas
  // Of replicas: admission points that these members have passed, in all groups the same count.
  std::uint64_t points = 0;
  bool point_open =
      false;  // the latest was of a sync that has not succeeded: again, it is the same
  // Members that could not connect. Where a link between them is needed, the master relays it. At
  // most kMaxRelayed, in ascending order.
  std::vector<RankPair> relayed;
  bool operator==(const EpochRecord&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.epoch, self.cause, self.admission, self.abort_floor, self.members, self.plan,
          self.census, self.departures, self.aborted, self.syncing, self.state, self.rates,
          self.ranks_per_replica, self.points, self.point_open, self.relayed);
  }
};

// What is wrong with the pairs that are relayed, if anything is.
[[nodiscard]] Status check_relays(const EpochRecord& record);

// The number of the admission point that such a round is.
[[nodiscard]] std::uint64_t next_point(const EpochRecord& record, RoundKind kind);

// The master's one decision on an operation.
struct Verdict {
  OpKey key;
  std::uint64_t attempt = 0;
  Code code = Code::ok;         // ok: commit
  bool newcomers_wait = false;  // commit only
  PeerId culprit;
  std::string reason;
  std::string waiting;  // deadlock only
  bool operator==(const Verdict&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.key, self.attempt, self.code, self.newcomers_wait, self.culprit, self.reason,
          self.waiting);
  }
};

// The master's one decision on a round. An admit round that lets newcomers in is decided by its
// EpochRecord instead.
struct Outcome {
  RoundKey key;
  Code code = Code::ok;
  // peers_pending: 1 when newcomers wait. admit, sync_admit: 1 when the members are to measure now.
  std::uint64_t answer = 0;
  Census census;
  PeerId culprit;
  std::string reason;
  std::string waiting;
  SyncDecision sync;  // of the rounds of a sync
  bool operator==(const Outcome&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.key, self.code, self.answer, self.census, self.culprit, self.reason, self.waiting,
          self.sync);
  }
};

// What the end of a round changes in the record of its epoch.
[[nodiscard]] bool changes_record(const Outcome& outcome, const EpochRecord& record);
void apply(const Outcome& outcome, EpochRecord& record);

// The group's history as all members see it, in one order. Ordinals are consecutive.
struct LogEntry {
  std::uint64_t ordinal = 0;
  std::variant<EpochRecord, Verdict, Outcome> what;
  bool operator==(const LogEntry&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.ordinal, self.what);
  }
};

// How a link stands, seen from one end.
enum class LinkState : std::uint8_t {
  broken,       // it was up and its connection ended
  unreachable,  // it could not be (re)dialled in time
  silent,       // nothing was heard on it for the heartbeat timeout
  mended,       // it works after all
  relayed,      // ... through the master
};
constexpr unsigned enum_count(LinkState) { return 5; }

}  // namespace pccl::wire
