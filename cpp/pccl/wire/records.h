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

enum class RoundKind : std::uint8_t { admit, peers_pending, barrier };
constexpr unsigned enum_count(RoundKind) { return 3; }
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
[[nodiscard]] std::string describe(const OpKey& key);     // "allreduce #3", "allreduce tag 7 #0"
[[nodiscard]] std::string describe(const RoundKey& key);  // "barrier #2"
[[nodiscard]] std::string describe(const CallKey& key);

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
  bool rerun = false;  // on_loss = rerun (else abort)
  Signature signature;
  bool operator==(const OpState&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.key, self.attempt, self.phase, self.rerun, self.signature);
  }
};

// ---- the plan
// -----------------------------------------------------------------------------------------------------

enum class ScheduleKind : std::uint8_t { ring, direct };
constexpr unsigned enum_count(ScheduleKind) { return 2; }

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
  bool operator==(const Plan&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.segment_bytes, self.order, self.classes);
  }
};

// ---- the group's log
// ----------------------------------------------------------------------------------------------

struct Member {
  PeerId id;
  std::uint64_t joined = 0;  // join ordinal: grows with every join, never reused in a run
  std::vector<Address> addresses;
  bool operator==(const Member&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.id, self.joined, self.addresses);
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
  bool operator==(const EpochRecord&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.epoch, self.cause, self.admission, self.abort_floor, self.members, self.plan,
          self.census, self.departures, self.aborted);
  }
};

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
  std::uint64_t answer = 0;  // peers_pending: 1 when newcomers wait
  Census census;
  PeerId culprit;
  std::string reason;
  std::string waiting;
  bool operator==(const Outcome&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.key, self.code, self.answer, self.census, self.culprit, self.reason, self.waiting);
  }
};

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

// All a member knows that a master without memory needs.
struct Report {
  EpochRecord record;
  std::uint64_t applied = 0;        // ordinal of the last entry applied
  std::vector<LogEntry> log;        // entries not known to be collected by all, up to `applied`
  std::vector<OpState> operations;  // entered or done, without a verdict
  std::vector<RoundKey> rounds;     // entered, without an outcome
  bool operator==(const Report&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.record, self.applied, self.log, self.operations, self.rounds);
  }
};

}  // namespace pccl::wire
