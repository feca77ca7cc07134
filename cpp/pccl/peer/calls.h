// Every call that this peer has made or heard of, one entry each, from the call to its end here and
// at the master. Pure: no I/O, no bytes of arrays.
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
#include "pccl/reduce/quantize.h"
#include "pccl/state/transfer.h"
#include "pccl/wire/messages.h"

namespace pccl::peer {

using Record = std::shared_ptr<const wire::EpochRecord>;

// What the user has of a call. Made by the engine; `done` may be read by any thread, the results
// only after it.
struct Call {
  wire::CallKey key;
  std::atomic<bool> done{false};
  Error error{Code::ok, {}, {}, {}};
  Record record;             // the epoch in which it was decided
  std::uint64_t answer = 0;  // round
  std::uint32_t attempts = 0;
  collective::Traffic traffic;
  // The caller gave up with that code. Without a verdict by then this peer leaves the run.
  std::optional<std::pair<Instant, Code>> gave_up;
  std::unique_ptr<state::Update> update;  // sync: what changes here
  std::atomic<bool> asks{false};          // sync: Engine::take_question() has something
  // Of a sync while it runs, for any thread: bytes received and to be received.
  std::atomic<std::uint64_t> bytes_done{0};
  std::atomic<std::uint64_t> bytes_wanted{0};

  // What an attempt of it has moved, when that attempt ends.
  void count(const collective::Traffic& moved) {
    traffic.tx_bytes += moved.tx_bytes;
    traffic.rx_bytes += moved.rx_bytes;
  }
};
using CallPtr = std::shared_ptr<Call>;

// What to reduce, and what to do when a member is lost.
struct OperationRequest {
  std::vector<collective::ArrayRef> arrays;
  collective::Kind kind = collective::Kind::all_reduce;
  // The members by whom the caller counts `root` and `parts`: as of its latest call that ended.
  // Members that make the same calls have the same view at each, however late they make it; the
  // present members may be others by then. Null: the present ones.
  Record view;
  std::uint32_t root = 0;            // of a broadcast: a rank in `view`
  std::uint32_t parts = 0;           // members that the arrays are made for; 0: any number
  ReduceOp op = ReduceOp::sum;       // sum where nothing is combined
  std::optional<std::uint64_t> tag;  // nothing: matched by order
  // Without a tag (level 1: with tag 0, the default) one thread makes all calls, unless the caller
  // sees to the order of its threads' calls.
  bool any_thread = false;
  // Runs again when a member is lost; else it fails. A broadcast fails all the same when its root
  // is lost, and a reduce-scatter at any loss. An all-gather's results are those of fewer members
  // then, and take the first part of its arrays.
  bool rerun = false;
  bool alone_is_error = false;  // level 1: too_few_peers in a world of one
  std::uint64_t structure = 0;  // hash of what else must agree: key paths, shapes
  std::string description;      // for errors: "1000 float32"
  // How elements travel between hosts; a group on one host has nothing to save by it, and reduces
  // exactly.
  reduce::Quantization quantization;
};

// How a call ended, and the epoch in which that was decided. A member that makes the call later is
// told the same as those that were in it.
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
  finished,    // an operation: every result is here; the verdict is not
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
  // What the master was told and has not decided. Said again on a new connection.
  std::optional<wire::OpState> told;
  std::optional<wire::RoundPayload> entered;
  std::optional<wire::AbortRequest> abort;
  // Of an operation:
  OperationRequest request;
  PeerId root;  // of a broadcast; its rank in `world` is request.root
  std::uint64_t attempt = 0;
  wire::Signature signature;
  Record world;                // of the attempt
  bool told_attempt = false;   // `told` is of this attempt
  std::optional<Instant> due;  // when the master is to be told
  std::optional<Error> why;    // failed
  [[nodiscard]] bool runs() const {
    return phase == CallPhase::in_memory || phase == CallPhase::on_network;
  }
};

// *one thread: the engine's*
class CallTable {
 public:
  // -- numbers: members' calls meet by them
  // The key of the next operation. It counts as called with take_number().
  [[nodiscard]] wire::OpKey next_operation(std::optional<std::uint64_t> tag) const;
  void take_number(const wire::OpKey& key);
  // The key of the next round, which counts as called.
  [[nodiscard]] wire::RoundKey next_round(wire::RoundKind kind);
  // A sync has several rounds of one number; those of `kind` up to it count as called.
  void skip_rounds(wire::RoundKind kind, std::uint64_t next) { rounds_[kind] = next; }
  // This peer has made it, or it is of another admission.
  [[nodiscard]] bool was_called(const wire::CallKey& key) const;

  // -- entries
  // Null: there is none.
  [[nodiscard]] CallEntry* find(const wire::CallKey& key);
  [[nodiscard]] const CallEntry* find(const wire::CallKey& key) const;
  [[nodiscard]] CallEntry& at(const wire::CallKey& key) { return entries_.at(key); }
  CallEntry& open(const wire::CallKey& key, const CallPtr& call);
  void move(CallEntry& entry, CallPhase to);
  // It has ended here. The entry stays, as `over`, while the master has it open.
  void end(const wire::CallKey& key);
  // Nothing is open any more.
  void clear();
  [[nodiscard]] std::vector<wire::OpKey> operations() const;            // that have not ended here
  [[nodiscard]] std::vector<CallPtr> operation_calls() const;           // the same
  [[nodiscard]] std::vector<CallPtr> calls() const;                     // the same, and rounds
  [[nodiscard]] std::size_t unfinished() const { return unfinished_; }  // operations
  // Its end is still to come, or the master has yet to hear of it.
  [[nodiscard]] bool awaits(const wire::CallKey& key) const;
  // Numbers begin at 0. Nothing of the admission before is open.
  void begin_admission(std::uint64_t admission);

  // -- verdicts of the master
  // The master has closed it: nothing of it is said again. An entry that is over goes.
  void close_at_master(const wire::CallKey& key);
  // It ended before it was called here; dropped if it was.
  void hear(const wire::CallKey& key, Decision decision);
  // How the call ended before it was made; given once.
  [[nodiscard]] std::optional<Decision> take_early(const wire::CallKey& key);

  // -- what the master is to hear
  // Notes what it is told of an operation.
  const wire::OpState& tell(const wire::OpKey& key, CallEntry& entry, wire::OpPhase phase);
  // It is to be told of the operation at that time, unless that has ended by then.
  void tell_later(const wire::OpKey& key, CallEntry& entry, Instant when);
  // Every result of the operation is here.
  void finish(const wire::OpKey& key, CallEntry& entry);
  // Operations of which it is to be told by now; `all`: or later.
  [[nodiscard]] std::vector<wire::OpKey> take_due(Instant now, bool all);
  [[nodiscard]] Instant next_due() const;
  // It is told that the operation is done with the next take_reports().
  void tell_done(const wire::OpKey& key) { done_.push_back(key); }
  [[nodiscard]] bool has_reports() const { return !done_.empty(); }
  [[nodiscard]] std::vector<wire::OpState> take_reports();
  // Operations that are over here run in that epoch now, as far as the master knows.
  void renew_reports(std::uint64_t epoch);
  // All that a master must hear on a new connection.
  [[nodiscard]] std::vector<wire::Message> open_messages() const;

  // -- callers that gave up
  void give_up(const CallPtr& call, Instant until, Code code);
  [[nodiscard]] std::vector<CallPtr> gave_up();  // a copy: the first one may end them all
  [[nodiscard]] Instant next_give_up() const;

  // How often each entry of call_transitions() was taken.
  [[nodiscard]] std::span<const std::uint64_t> transitions_taken() const { return taken_; }

 private:
  using Entries = std::map<wire::CallKey, CallEntry>;
  void drop(Entries::iterator it);
  void forget_due(CallEntry& entry, const wire::CallKey& key);

  Entries entries_;
  std::size_t unfinished_ = 0;
  // Indices of entries.
  std::set<std::pair<Instant, wire::OpKey>> due_;
  std::vector<wire::OpKey> done_;
  std::vector<CallPtr> gave_up_;  // until they are done
  std::uint64_t admission_ = 0;
  std::uint64_t untagged_ = 0;  // next numbers
  std::map<std::uint64_t, std::uint64_t> tagged_;
  std::map<wire::RoundKind, std::uint64_t> rounds_;
  std::array<std::uint64_t, 22> taken_{};
};

}  // namespace pccl::peer
