// The table of this peer's calls. An entry begins with the call, or with an earlier decision on it,
// and stays until the call has ended here and at the master. Pure: no I/O, no bytes of arrays.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/base/ids.h"
#include "pccl/collective/executor.h"
#include "pccl/peer/totals.h"
#include "pccl/reduce/quantize.h"
#include "pccl/state/transfer.h"
#include "pccl/wire/messages.h"

namespace pccl::peer {

using Record = std::shared_ptr<const wire::EpochRecord>;

// A call, as its caller sees it. Made by the engine. Any thread may read `done`, and the results
// once `done` is true.
struct Call {
  wire::CallKey key;
  std::atomic<bool> done{false};
  Error error{Code::ok, {}};
  Record record;             // the epoch in which it was decided
  std::uint64_t answer = 0;  // round: Outcome::answer
  std::uint32_t attempts = 0;
  std::uint64_t bytes = 0;  // operation: of the elements that this member passes
  collective::BytesMoved traffic;
  Timing timing;  // operation
  // Set when the caller has given up: the deadline for a verdict, after which this peer leaves the
  // run, and the caller's code.
  std::optional<std::pair<Instant, Code>> gave_up;
  std::unique_ptr<state::Update> update;  // sync: the changes to this member's state
  std::atomic<bool> asks{false};          // sync: Engine::take_question() has entries
  // Progress of a running sync, for any thread: bytes received, and bytes to receive in all.
  std::atomic<std::uint64_t> bytes_done{0};
  std::atomic<std::uint64_t> bytes_wanted{0};

  // Adds the traffic of an attempt that has ended.
  void count(const collective::BytesMoved& moved) {
    traffic.tx_bytes += moved.tx_bytes;
    traffic.rx_bytes += moved.rx_bytes;
    traffic.saved_bytes += moved.saved_bytes;
  }
};
using CallPtr = std::shared_ptr<Call>;

// An operation to start, and its behaviour when a member is lost.
struct OperationRequest {
  std::vector<collective::ArrayRef> arrays;
  collective::Kind kind = collective::Kind::all_reduce;
  // The epoch to whose members `root` and `parts` refer: that of the caller's latest call that has
  // ended. Members that make the same calls have the same view at each call, however late they make
  // it. The present members may differ by then. Null: the present members.
  Record view;
  std::uint32_t root = 0;            // broadcast: a rank in `view`
  std::uint32_t parts = 0;           // members that the arrays are made for; 0: any number
  ReduceOp op = ReduceOp::sum;       // sum where nothing is combined
  std::optional<std::uint64_t> tag;  // empty: calls are matched by order
  // The caller orders the calls of its threads. Otherwise one thread must make all calls without a
  // tag (explicit API: with tag 0, the default).
  bool any_thread = false;
  // Run again when a member is lost, instead of failing. A broadcast still fails when its root is
  // lost, and a reduce-scatter or all-to-all at any loss. An all-gather that runs again has the
  // results of fewer members, which take the first part of its arrays.
  bool rerun = false;
  bool alone_is_error = false;  // explicit API: too_few_peers in a world of one
  std::uint64_t structure = 0;  // hash of all else that must agree: key paths, shapes
  std::string description;      // for errors: "1000 float32"
  // The encoding of elements between hosts. A group on one host ignores it and reduces exactly.
  reduce::Quantization quantization;
};

// How a call ended, and the epoch in which that was decided. A member that makes the call later
// gets the same decision.
struct Decision {
  Error error;
  Record record;
};

// `kTransitions` in calls.cpp lists every change.
enum class CallPhase : std::uint8_t {
  unknown,     // no entry
  heard,       // the master ended it before it was called here
  meeting,     // a round: the master waits for the other members
  called,      // an operation: no attempt runs
  in_memory,   // an operation: runs in memory of this host
  on_network,  // an operation: runs over links
  finished,    // an operation: every result is here; the verdict is outstanding
  failed,      // an operation: cannot run; the master was asked to end it for all members
  over,        // it has ended here, and the master has not closed it
};
inline constexpr std::size_t kCallPhases = 9;
[[nodiscard]] const char* name(CallPhase phase);

struct CallTransition {
  CallPhase from;
  CallPhase to;
  const char* cause;
};
// Every change of phase that is legal.
[[nodiscard]] std::span<const CallTransition> call_transitions();

struct CallEntry {
  CallPhase phase = CallPhase::unknown;
  CallPtr call;                   // null: heard, or over
  std::optional<Decision> early;  // heard: how it ended
  // Reports that the master has not decided yet. Repeated on a new connection.
  std::optional<wire::OpState> told;
  std::optional<wire::RoundPayload> entered;
  std::optional<wire::AbortRequest> abort;
  // For an operation:
  OperationRequest request;
  PeerId root;  // broadcast; its rank in `world` is request.root
  std::uint64_t attempt = 0;
  std::uint64_t signature = 0;  // must be equal on all members
  Record world;                 // the attempt's epoch
  bool told_attempt = false;    // this attempt was reported, or is about to be as done
  bool too_late = false;        // in memory: the master has ended it, but it is committed
  std::optional<Instant> due;   // when to report the operation as entered
  std::optional<Error> why;     // failed: the reason
  [[nodiscard]] bool runs() const {
    return phase == CallPhase::in_memory || phase == CallPhase::on_network;
  }
};

// *one thread: the engine's*
class CallTable {
 public:
  // -- numbers, by which the members' calls are matched
  // The key of the next operation. take_number() counts it as called.
  [[nodiscard]] wire::OpKey next_operation(std::optional<std::uint64_t> tag) const;
  void take_number(const wire::OpKey& key);
  // Returns the key of the next round and counts it as called.
  [[nodiscard]] wire::RoundKey next_round(wire::RoundKind kind);
  // Counts all rounds of `kind` before number `next` as called, for calls of several rounds.
  void skip_rounds(wire::RoundKind kind, std::uint64_t next) { rounds_[kind] = next; }
  // This peer has made the call, or it belongs to another admission.
  [[nodiscard]] bool was_called(const wire::CallKey& key) const;

  // -- entries
  // Null: there is none.
  [[nodiscard]] CallEntry* find(const wire::CallKey& key);
  [[nodiscard]] const CallEntry* find(const wire::CallKey& key) const;
  [[nodiscard]] CallEntry& at(const wire::CallKey& key) { return entries_.at(key); }
  CallEntry& open(const wire::CallKey& key, const CallPtr& call);
  void move(CallEntry& entry, CallPhase to);
  // The call has ended here. Its entry stays, as `over`, if the master knows the operation and has
  // not closed it.
  void end(const wire::CallKey& key);
  // Drops all entries and reports, and the callers that gave up.
  void clear();
  [[nodiscard]] std::vector<wire::OpKey> operations() const;            // not ended here
  [[nodiscard]] std::vector<CallPtr> operation_calls() const;           // the same
  [[nodiscard]] std::vector<CallPtr> calls() const;                     // the same, and rounds
  [[nodiscard]] std::size_t unfinished() const { return unfinished_; }  // operations not ended here
  // The call has not ended here, or the master has not closed it although it is done here.
  [[nodiscard]] bool awaits(const wire::CallKey& key) const;
  // Restarts all numbers at 0 and clears the table.
  void begin_admission(std::uint64_t admission);

  // -- verdicts of the master
  // The master has closed the call: its reports are not repeated. An entry that is over is erased.
  void close_at_master(const wire::CallKey& key);
  // Stores a decision for a call that was not made here yet. Does nothing if it was made.
  void hear(const wire::CallKey& key, Decision decision);
  // Takes the decision that arrived before the call was made. Empty: there is none.
  [[nodiscard]] std::optional<Decision> take_early(const wire::CallKey& key);

  // -- reports to the master
  // Records a report of an operation, and returns it to be sent.
  const wire::OpState& tell(const wire::OpKey& key, CallEntry& entry, wire::OpPhase phase);
  // Schedules a report of the operation, unless one is due earlier. Dropped if the operation ends.
  void tell_later(const wire::OpKey& key, CallEntry& entry, Instant when);
  // Every result of the operation is here: take_reports() will report it as done.
  void finish(const wire::OpKey& key, CallEntry& entry);
  // Takes the operations whose scheduled report is due; `all`: every scheduled one.
  [[nodiscard]] std::vector<wire::OpKey> take_due(Instant now, bool all);
  [[nodiscard]] Instant next_due() const;
  // The next take_reports() reports the operation as done.
  void tell_done(const wire::OpKey& key) { done_.push_back(key); }
  [[nodiscard]] bool has_reports() const { return !done_.empty(); }
  [[nodiscard]] std::vector<wire::OpState> take_reports();
  // A new epoch: operations that are over here are reported as done again, in that epoch.
  void renew_reports(std::uint64_t epoch);
  // The reports that a master needs on a new connection.
  [[nodiscard]] std::vector<wire::Message> open_messages() const;

  // -- callers that gave up
  void give_up(const CallPtr& call, Instant until, Code code);
  [[nodiscard]] std::vector<CallPtr> gave_up();  // a copy: handling one may end them all
  [[nodiscard]] Instant next_give_up() const;

  // How often each entry of call_transitions() was taken.
  [[nodiscard]] std::span<const std::uint64_t> transitions_taken() const { return taken_; }

 private:
  using Entries = std::map<wire::CallKey, CallEntry>;
  void drop(Entries::iterator it);
  void forget_due(CallEntry& entry, const wire::CallKey& key);

  Entries entries_;
  std::size_t unfinished_ = 0;
  std::set<std::pair<Instant, wire::OpKey>> due_;  // entries by their `due`
  std::vector<wire::OpKey> done_;                  // entries that are reported as done next
  std::vector<CallPtr> gave_up_;  // calls whose callers gave up, until they are done
  std::uint64_t admission_ = 0;
  std::uint64_t untagged_ = 0;                       // the next number without a tag
  std::map<std::uint64_t, std::uint64_t> tagged_;    // the next number, by tag
  std::map<wire::RoundKind, std::uint64_t> rounds_;  // the next number, by kind
  std::array<std::uint64_t, 22> taken_{};
};

}  // namespace pccl::peer
