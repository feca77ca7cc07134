// Runs operations of any schedule over links. A segment is combined when its contributions have
// arrived, and passed on at once. Sans-I/O: stripes ask it where to put received bytes and what to
// send next.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "pccl/base/buffer.h"
#include "pccl/base/error.h"
#include "pccl/base/parallel.h"
#include "pccl/collective/attempt.h"
#include "pccl/link/carrier.h"
#include "pccl/link/stripe.h"
#include "pccl/wire/records.h"

namespace pccl::collective {

struct ExecutorOptions {
  // For staged contributions, over all operations. Each contributor may always send one segment.
  std::uint64_t buffer_bytes = 256ULL << 20;
  // Contributions of an operation to one peer are sent without a grant if they have at most this
  // many bytes, and fit into `eager_room`.
  std::uint32_t eager_bytes = 64 << 10;
  // All bytes that were sent to a peer without a grant, and which it has not used yet.
  std::uint64_t eager_room = 1 << 20;
};

struct ExecutorEvents {
  // Operations for which each of the peers that send something has begun to.
  std::vector<wire::OpKey> met;
  // Operations whose result bytes are all in engine or user memory. They wait for their verdicts.
  std::vector<wire::OpKey> finished;
  // A frame has another signature than this member's operation.
  bool disagreement = false;
  [[nodiscard]] bool empty() const { return met.empty() && finished.empty() && !disagreement; }
};

// *one thread: the engine's*
class Executor {
 public:
  Executor(const ExecutorOptions& options, std::shared_ptr<BufferPool> pool, link::Carrier& links,
           Parallel& parallel)
      : options_(options), pool_(std::move(pool)), links_(links), parallel_(parallel) {}

  // Combines all segments whose contributions have arrived, and passes them on. Call after frames
  // have arrived.
  void combine();
  // combine() has something to do, or take_events() something to tell.
  [[nodiscard]] bool has_work() const { return !ready_.empty() || !events_.empty(); }

  // Starts an attempt. Arrays must stay valid until commit() or cancel() returns. After an error
  // (internal_error: no memory) nothing was started. REQUIRES: no attempt with this key is running.
  Status start(OperationSpec spec);
  // Gives up an attempt. On return no array is used any more, and inputs are as before the call.
  // Returns what the attempt has moved; zero if none is running.
  BytesMoved cancel(const wire::OpKey& key);
  // Commits: copies in-place results and residuals to their arrays, then ends the attempt as
  // cancel() does. REQUIRES: the attempt has finished.
  BytesMoved commit(const wire::OpKey& key);
  [[nodiscard]] ExecutorEvents take_events() { return std::exchange(events_, {}); }

  // Begins an epoch: drops what was received early for attempts before `abort_floor` and for
  // earlier admissions.
  void set_epoch(std::uint64_t epoch, std::uint64_t abort_floor, std::uint64_t admission);
  // Drops what was received for an operation that ended before it was called here.
  void forget(const wire::OpKey& key) { drop_early(key); }
  // The link to a peer is new, or down: grants and eager room start over.
  void reset_link(const PeerId& peer);

  // -- the link's side, see link::Traffic. `called`: the operation of the frame was called here, so
  // frames that arrive after its end are dropped.
  link::Placement place(const PeerId& from, const link::FrameHeader& header, bool called);
  Status arrived(const PeerId& from, const link::FrameHeader& header, std::uint64_t token,
                 Buffer buffer, bool called);
  void voided(const PeerId& from, const link::FrameHeader& header, std::uint64_t token);
  void drained(const PeerId& from, const link::FrameHeader& header);
  void interrupted(const PeerId& from, const link::FrameHeader& header, std::uint64_t token);
  // `bytes` that were sent to this peer without a grant did not arrive and will not be sent again.
  void eager_unsent(const PeerId& to, std::uint64_t bytes);
  Status control(const PeerId& from, const link::FrameHeader& header, bool called);
  bool next(const PeerId& to, link::OutgoingFrame& frame);
  // Attempts that are running.
  [[nodiscard]] std::size_t operation_count() const { return attempts_.size(); }

 private:
  // A link's state.
  struct Port {
    std::deque<wire::OpKey> turn;  // operations that can send: a segment each in turn
    std::deque<link::FrameHeader> control;
    std::uint64_t eager_out = 0;   // bytes reserved or sent, and not returned
    std::uint64_t eager_used = 0;  // received and used, not yet returned
    std::uint64_t eager_kept = 0;  // received for operations not started here
  };
  struct EarlyFrame {
    link::FrameHeader header;
    Buffer buffer;
  };
  // A segment whose contributions or, in `final`, final bytes are here.
  struct Ready {
    wire::OpKey key;
    std::uint64_t token = 0;
    std::uint32_t segment = 0;
    Buffer final;
  };
  // Frames of one peer for one operation that was not called here yet.
  struct Early {
    std::vector<EarlyFrame> frames;
    std::uint32_t credit = 0;
    bool asks = false;
    std::uint64_t attempt = 0;  // the newest of these frames
  };
  // Frames of one peer for all operations that were not called here yet. Every peer has its own, so
  // that peers do not affect each other.
  struct EarlyPeer {
    std::map<wire::OpKey, Early> operations;
    std::size_t frames = 0;
  };

  void prepare(RunningAttempt& attempt);
  // Segments are independent: these four touch memory of theirs alone.
  void combine(RunningAttempt& attempt, std::uint32_t segment);
  void append(RunningAttempt& attempt, std::uint32_t segment);
  void scatter(RunningAttempt& attempt, std::uint32_t segment, const Buffer& from);
  void place_final(RunningAttempt& attempt, std::uint32_t segment, const Buffer& from);
  void pass_on(RunningAttempt& attempt, Ready& ready);
  void segment_final(RunningAttempt& attempt, std::uint32_t segment);
  void contribution(RunningAttempt& attempt, std::uint32_t segment, std::uint32_t source,
                    Buffer buffer);
  void offer(RunningAttempt& attempt, const PeerId& to, std::uint32_t segment, bool final);
  void post_receives(RunningAttempt& attempt);
  void grant(RunningAttempt& attempt, const PeerId& to, std::uint32_t credit);
  void await(RunningAttempt& attempt, std::uint32_t rank);
  void hear(RunningAttempt& attempt, std::uint32_t rank);
  [[nodiscard]] Early& early_for(const PeerId& from, const link::FrameHeader& header);
  [[nodiscard]] bool room_for_early(const PeerId& from, const wire::OpKey& key) const;
  void forget_frames(const PeerId& from, const Early& early);
  void use_early(RunningAttempt& attempt);
  void use_early(RunningAttempt& attempt, const PeerId& from, EarlyFrame& frame);
  void ungrant(const PeerId& from, const link::FrameHeader& header, std::uint64_t token);
  void drop_early(const wire::OpKey& key);
  void eager_consumed(const PeerId& from, std::uint64_t bytes);
  void unkeep(const PeerId& from, std::uint64_t bytes);
  void combined(RunningAttempt& attempt, std::uint32_t segment);
  void queue_turn(const PeerId& to, RunningAttempt& attempt, Outlet& outlet);
  void send_control(const PeerId& to, const link::FrameHeader& header);
  void final_bytes(RunningAttempt& attempt, std::uint32_t segment, Buffer from);
  [[nodiscard]] RunningAttempt* find(const wire::OpKey& key);

  static constexpr std::uint32_t kUnlimited = std::numeric_limits<std::uint32_t>::max();
  // The sum of two credits; kUnlimited stays that.
  [[nodiscard]] static constexpr std::uint32_t plus(std::uint32_t credit, std::uint32_t more) {
    return credit > kUnlimited - more ? kUnlimited : credit + more;
  }

  ExecutorOptions options_;
  std::shared_ptr<BufferPool> pool_;
  link::Carrier& links_;
  Parallel& parallel_;
  std::vector<Ready> ready_;
  ExecutorEvents events_;
  std::uint64_t epoch_ = 0;
  std::uint64_t abort_floor_ = 0;
  std::uint64_t admission_ = 0;
  std::uint64_t next_token_ = 0;
  std::uint64_t granted_bytes_ = 0;
  std::map<wire::OpKey, std::unique_ptr<RunningAttempt>> attempts_;
  std::map<PeerId, EarlyPeer> early_;
  std::map<PeerId, Port> ports_;
};

}  // namespace pccl::collective
