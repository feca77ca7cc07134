// Runs operations over links, whatever their schedule: a segment is combined the moment its
// contributions are there and passed on at once. Sans-I/O: stripes ask it where bytes go and what
// to send next.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pccl/base/buffer.h"
#include "pccl/base/dtype.h"
#include "pccl/base/error.h"
#include "pccl/collective/schedule.h"
#include "pccl/link/carrier.h"
#include "pccl/link/stripe.h"
#include "pccl/reduce/quantize.h"
#include "pccl/wire/records.h"

namespace pccl::collective {

// One array of an operation. `send` and `recv` are the same memory (in place; not in the halves of
// an all-reduce) or do not overlap.
struct ArrayRef {
  const void* send = nullptr;  // of a broadcast: read by the root alone
  void* recv = nullptr;
  // Elements. Of a reduce-scatter, of one part: `send` has as many of these as there are members.
  // Of an all-gather, of `send`: `recv` has as many of these.
  std::uint64_t count = 0;
  DataType dtype = DataType::float32;
  // Of an array that is quantized: what encoding left out the last time, `count` values of its
  // accumulation type. They are added to what is encoded, and hold what that leaves out after a
  // commit. May be null.
  void* residual = nullptr;
};

// One attempt at one operation.
struct OperationSpec {
  wire::OpKey key;
  std::uint64_t attempt = 0;
  std::uint32_t signature = 0;  // members with another one never exchange bytes with this one
  Collective what;
  ReduceOp op = ReduceOp::sum;  // sum where nothing is combined
  // How floating-point elements travel (of an all-reduce among several; not prod): contributions to
  // a chunk's owner on another host, and results. Arrays that are too small to gain by it, and
  // integers, are as exact as ever.
  reduce::Quantization quantization;
  std::vector<ArrayRef> arrays;
  std::shared_ptr<const wire::EpochRecord> world;  // members in rank order, and the plan
  std::uint32_t rank = 0;
};

struct Traffic {
  std::uint64_t tx_bytes = 0;  // payload
  std::uint64_t rx_bytes = 0;
};

struct ExecutorOptions {
  std::uint64_t buffer_bytes =
      256ULL << 20;  // staged contributions, over all operations (each may stage one segment)
  std::uint32_t eager_bytes =
      64 << 10;  // to one peer: at most this much of an operation is sent unasked ...
  std::uint64_t eager_room =
      1 << 20;  // ... while all such bytes that the peer has not used stay below this
};

struct ExecutorEvents {
  // Every result byte of the attempt is in engine or user memory; it waits for its verdict.
  std::vector<wire::OpKey> finished;
  // A frame of the operation has another signature than ours.
  bool disagreement = false;
};

// *one thread: the engine's*
class Executor {
 public:
  Executor(const ExecutorOptions& options, std::shared_ptr<BufferPool> pool, link::Carrier& links)
      : options_(options), pool_(std::move(pool)), links_(links) {}

  // Starts an attempt. Arrays must stay valid until commit or cancel returns; after an error (no
  // memory) nothing was started. REQUIRES: the key is not running.
  Status start(OperationSpec spec);
  // Gives up an attempt: when this returns no array is used any more and inputs are as they were.
  // Returns what the attempt has moved; nothing where none is running.
  Traffic cancel(const wire::OpKey& key);
  // The verdict was commit: in-place results are moved into their arrays, and the attempt ends as
  // by cancel. REQUIRES: it has finished.
  Traffic commit(const wire::OpKey& key);
  [[nodiscard]] ExecutorEvents take_events() { return std::exchange(events_, {}); }
  [[nodiscard]] bool running(const wire::OpKey& key) const { return operations_.contains(key); }

  // The epoch changed: what was received for attempts before `abort_floor` or another admission is
  // dropped.
  void set_epoch(std::uint64_t epoch, std::uint64_t abort_floor, std::uint64_t admission);
  // What was received for an operation that ended before it was called here is dropped.
  void forget(const wire::OpKey& key) { drop_early(key); }
  // The connection to a peer is new, or gone: grants and eager room start over.
  void reset_link(const PeerId& peer);

  // -- the link's side. `called`: the frame's operation was called here, so that what comes for it
  // after its end is of no use.
  link::Placement place(const PeerId& from, const link::FrameHeader& header, bool called);
  Status arrived(const PeerId& from, const link::FrameHeader& header, std::uint64_t token,
                 Buffer buffer, bool called);
  void voided(const PeerId& from, const link::FrameHeader& header, std::uint64_t token);
  void drained(const PeerId& from, const link::FrameHeader& header);
  void interrupted(const PeerId& from, const link::FrameHeader& header, std::uint64_t token);
  // Of what had been sent to this peer unasked, so much did not come and is not sent again.
  void eager_unsent(const PeerId& to, std::uint64_t bytes);
  Status control(const PeerId& from, const link::FrameHeader& header, bool called);
  bool next(const PeerId& to, link::OutgoingFrame& frame);
  // Payload bytes waiting for a grant or for the wire, over all peers: for tests.
  [[nodiscard]] std::size_t operation_count() const { return operations_.size(); }

 private:
  struct Held {
    std::uint32_t source = 0;  // index into the flow's sources
    Buffer buffer;
  };
  struct SegmentState {
    std::vector<Held> held;     // contributions that wait for the others
    std::vector<bool> seen;     // by source
    std::uint32_t missing = 0;  // contributions
    bool finished = false;      // final bytes are in place
    std::uint32_t place = 0;    // in its chunk
  };
  // What goes to one peer.
  struct Outlet {
    std::deque<std::uint32_t> finals;
    // By place in their chunks: what others combine together is sent at about the same time.
    std::set<std::pair<std::uint32_t, std::uint32_t>> partials;
    std::uint32_t credit = 0;      // partial segments that may go now
    bool eager = false;            // partials go without a grant, out of reserved room
    std::uint64_t eager_left = 0;  // reserved and not yet sent
    bool queued = false;           // in the link's turn list
  };
  // A segment's length on the way, where it is quantized. Exact arrays in it travel as ever.
  struct CodedBytes {
    std::uint32_t raw = 0;          // a contribution of one member
    std::uint32_t accumulated = 0;  // of several
    std::uint32_t result = 0;
  };
  struct Operation {
    OperationSpec spec;
    std::uint64_t token = 0;
    Schedule schedule;
    Layout layout;
    std::vector<SegmentState> segments;
    std::size_t unfinished = 0;  // segments
    // By place in their chunks: segments that this rank has yet to combine with others' elements;
    // and the first place that has some.
    std::vector<std::uint32_t> to_combine;
    std::uint32_t combining = 0;
    Buffer scratch;                  // results of in-place arrays until the commit
    std::vector<std::uint8_t*> out;  // by array: where results go
    std::vector<Buffer> partials;    // by segment: those that do not fit where results go
    // Where spec.quantization is any:
    std::vector<CodedBytes> coded;  // by segment
    std::vector<Buffer> results;    // by segment: as they travel
    std::vector<Buffer> residuals;  // by array: those after a commit
    bool straight = false;          // contributions go to their owner in one hop, or host to host
    bool regional = false;          // from region to region
    std::map<PeerId, Outlet> outlets;
    std::map<PeerId, std::uint32_t> ranks;
    std::map<PeerId, std::uint32_t> window;  // grants outstanding, by contributor
    // Of these: segments that were granted and have not come.
    std::map<PeerId, std::uint32_t> granted;
    Traffic traffic;
  };
  // A link's state.
  struct Port {
    std::deque<wire::OpKey> turn;  // operations with something to send, each gets a segment in turn
    std::deque<link::FrameHeader> control;
    std::uint64_t eager_out = 0;   // reserved or sent, not returned
    std::uint64_t eager_used = 0;  // received and used, not yet returned
    std::uint64_t eager_kept = 0;  // received for operations not started here
  };
  struct EarlyFrame {
    link::FrameHeader header;
    Buffer buffer;
  };
  // What one peer has said of one operation that was not called here yet.
  struct Early {
    std::vector<EarlyFrame> frames;
    std::uint32_t credit = 0;
    bool asks = false;
    std::uint64_t attempt = 0;  // of the newest thing in here
  };
  // ... of all of them. Each peer has its own: what one says is nothing to what others said.
  struct EarlyPeer {
    std::map<wire::OpKey, Early> operations;
    std::size_t frames = 0;
  };

  void prepare(Operation& operation);
  void combine(Operation& operation, std::uint32_t segment);
  void scatter(Operation& operation, std::uint32_t segment, const Buffer& from);
  void segment_final(Operation& operation, std::uint32_t segment);
  void contribution(Operation& operation, std::uint32_t segment, std::uint32_t source,
                    Buffer buffer);
  void offer(Operation& operation, const PeerId& to, std::uint32_t segment, bool final);
  void post_receives(Operation& operation);
  void grant(Operation& operation, const PeerId& to, std::uint32_t credit);
  [[nodiscard]] Early& early_for(const PeerId& from, const link::FrameHeader& header);
  [[nodiscard]] bool room_for_early(const PeerId& from, const wire::OpKey& key) const;
  void forget_frames(const PeerId& from, const Early& early);
  void use_early(Operation& operation);
  void use_early(Operation& operation, const PeerId& from, EarlyFrame& frame);
  void ungrant(const PeerId& from, const link::FrameHeader& header, std::uint64_t token);
  void drop_early(const wire::OpKey& key);
  void eager_consumed(const PeerId& from, std::uint64_t bytes);
  void unkeep(const PeerId& from, std::uint64_t bytes);
  void combined(Operation& operation, std::uint32_t segment);
  // Results are the first thing that goes to a peer: it may not have called yet.
  [[nodiscard]] static bool results_first(const Operation& operation) {
    return !reduces(operation.spec.what.kind);
  }
  [[nodiscard]] static bool sendable(const Operation& operation, const Outlet& outlet);
  void queue_turn(const PeerId& to, Operation& operation, Outlet& outlet);
  void send_control(const PeerId& to, const link::FrameHeader& header);
  // Of a contribution, and of a result, as they travel.
  [[nodiscard]] static std::uint32_t contribution_bytes(const Operation& operation,
                                                        std::uint32_t segment, std::uint32_t from,
                                                        std::uint32_t to, bool accumulated);
  [[nodiscard]] static std::uint32_t result_bytes(const Operation& operation,
                                                  std::uint32_t segment);
  // Whether contributions to that chunk are quantized between these ranks.
  [[nodiscard]] static bool coded(const Operation& operation, std::uint32_t chunk,
                                  std::uint32_t from, std::uint32_t to);
  void prepare_codes(Operation& operation);
  Buffer encode_contribution(Operation& operation, std::uint32_t segment, bool accumulated);
  [[nodiscard]] Buffer decode_contribution(const Operation& operation, std::uint32_t index,
                                           const Buffer& from, bool accumulated);
  void combine_coded(Operation& operation, std::uint32_t segment);
  void decode_result(Operation& operation, std::uint32_t segment, const Buffer& from);
  [[nodiscard]] std::uint64_t unasked_bytes_from(const Operation& operation,
                                                 std::uint32_t rank) const;
  // Where a piece's own elements are, and where its results go.
  [[nodiscard]] static const std::uint8_t* own_at(const Operation& operation, std::uint32_t chunk,
                                                  const Piece& piece);
  [[nodiscard]] static std::uint8_t* result_at(const Operation& operation, std::uint32_t chunk,
                                               const Piece& piece);
  // Partial results of that segment are kept apart from the results.
  [[nodiscard]] static bool apart(const Operation& operation, const Segment& segment);
  void final_bytes(Operation& operation, std::uint32_t segment, Buffer from);
  [[nodiscard]] std::uint32_t source_index(const Operation& operation, std::uint32_t segment,
                                           const PeerId& from) const;
  [[nodiscard]] Operation* find(const wire::OpKey& key);
  link::FrameHeader header_for(const Operation& operation, link::FrameType type) const;

  ExecutorOptions options_;
  std::shared_ptr<BufferPool> pool_;
  link::Carrier& links_;
  ExecutorEvents events_;
  std::uint64_t epoch_ = 0;
  std::uint64_t abort_floor_ = 0;
  std::uint64_t admission_ = 0;
  std::uint64_t next_token_ = 0;
  std::uint64_t granted_bytes_ = 0;
  std::map<wire::OpKey, std::unique_ptr<Operation>> operations_;
  std::map<PeerId, EarlyPeer> early_;
  std::map<PeerId, Port> ports_;
};

}  // namespace pccl::collective
