// Runs operations of any schedule over links. A segment is combined when its contributions have
// arrived, and passed on at once. Sans-I/O: stripes ask it where to put received bytes and what to
// send next.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "pccl/base/buffer.h"
#include "pccl/base/dtype.h"
#include "pccl/base/error.h"
#include "pccl/base/parallel.h"
#include "pccl/collective/schedule.h"
#include "pccl/link/carrier.h"
#include "pccl/link/stripe.h"
#include "pccl/reduce/quantize.h"
#include "pccl/wire/records.h"

namespace pccl::collective {

// One array of an operation. `send` and `recv` do not overlap, or are the same memory (in place;
// only in an all-reduce or a broadcast).
struct ArrayRef {
  const void* send = nullptr;  // broadcast: read by the root alone
  void* recv = nullptr;
  // Elements: of one part, where `send` or `recv` or both have a part for each member
  // (collective::scatters, gathers).
  std::uint64_t count = 0;
  DataType dtype = DataType::float32;
  // Quantized arrays: the error that encoding left the last time, `count` values of the
  // accumulation type. It is added before encoding; a commit replaces it with the new error. May be
  // null.
  void* residual = nullptr;
  // The members among which that error was left out of a sum. In an average of fewer members it is
  // scaled down to them. 0: it fits any number.
  std::uint32_t residual_members = 0;
};

// One attempt at one operation.
struct OperationSpec {
  wire::OpKey key;
  std::uint64_t attempt = 0;
  std::uint32_t signature = 0;  // members with different signatures exchange no bytes
  Collective what;
  ReduceOp op = ReduceOp::sum;  // sum if nothing is combined
  // How floating-point elements are encoded in results and, except in rings, in contributions to
  // other hosts. Integers, and arrays too small to gain by it, are sent exactly. Only for an
  // all-reduce among several members, not for prod.
  reduce::Quantization quantization;
  std::vector<ArrayRef> arrays;
  std::shared_ptr<const wire::EpochRecord> world;  // members in rank order, and the plan
  std::uint32_t rank = 0;
};

struct BytesMoved {
  std::uint64_t tx_bytes = 0;  // payload
  std::uint64_t rx_bytes = 0;
  std::uint64_t saved_bytes = 0;  // tx_bytes would be more by this without quantization
};

struct ExecutorOptions {
  // For staged contributions, over all operations. Each contributor may always send one segment.
  std::uint64_t buffer_bytes = 256ULL << 20;
  // Contributions of an operation to one peer are sent without a grant if they have at most this
  // many bytes ...
  std::uint32_t eager_bytes = 64 << 10;
  // ... and all such bytes that the peer has not used yet stay within this room.
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
  [[nodiscard]] std::size_t operation_count() const { return operations_.size(); }

 private:
  struct Held {
    std::uint32_t source = 0;  // index into the flow's sources
    Buffer buffer;
  };
  struct SegmentState {
    std::vector<Held> held;     // contributions that wait for others
    std::vector<bool> seen;     // by source
    std::uint32_t missing = 0;  // contributions still to come or, if one, to be combined
    bool arrived = false;       // final bytes are here
    bool finished = false;      // ... and in place
    std::uint32_t place = 0;    // index in its chunk
  };
  // Segments that wait to be sent to one peer.
  struct Outlet {
    std::deque<std::uint32_t> finals;
    // Ordered by place in their chunks, so that members send segments that are combined together at
    // about the same time.
    std::set<std::pair<std::uint32_t, std::uint32_t>> partials;
    std::uint32_t credit = 0;      // segments granted and not sent
    bool eager = false;            // sends without grants, from reserved room
    std::uint64_t eager_left = 0;  // bytes reserved and not yet sent
    bool queued = false;           // in Port::turn
  };
  // The length of a quantized segment on the wire. Exact arrays in it have their usual length.
  struct CodedBytes {
    std::uint32_t raw = 0;          // a contribution of one member's elements
    std::uint32_t accumulated = 0;  // a partial result
    std::uint32_t result = 0;
  };
  struct Operation {
    OperationSpec spec;
    std::uint64_t token = 0;
    Schedule schedule;
    Layout layout;
    std::vector<SegmentState> segments;
    std::size_t unfinished = 0;  // segments without final bytes
    // By place in their chunks: the number of segments that this rank has yet to combine with
    // contributions. `combining`: the first place where it is not 0.
    std::vector<std::uint32_t> to_combine;
    std::uint32_t combining = 0;
    Buffer scratch;                  // results of in-place arrays until the commit
    std::vector<std::uint8_t*> out;  // by array: where results go
    std::vector<Buffer> partials;    // by segment, where apart() is true: until it is sent
    // Only with quantization:
    std::vector<CodedBytes> coded;  // by segment
    std::vector<Buffer> results;    // by segment: encoded
    std::vector<Buffer> residuals;  // by array: new ones, until the commit
    bool straight = false;          // no ring: contributions to other hosts are encoded
    bool regional = false;          // contributions are combined by regions
    std::map<PeerId, Outlet> outlets;
    std::map<PeerId, std::uint32_t> ranks;
    std::vector<bool> awaited;  // by rank: it will send, and nothing has come from it yet
    std::uint32_t unheard = 0;  // ranks of these
    std::map<PeerId, std::uint32_t> window;  // by contributor: segments that it may have in flight
    // The same contributors: segments granted that have not arrived.
    std::map<PeerId, std::uint32_t> granted;
    BytesMoved traffic;
  };
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
  // The same for all operations. Every peer has its own, so that peers do not affect each other.
  struct EarlyPeer {
    std::map<wire::OpKey, Early> operations;
    std::size_t frames = 0;
  };

  void prepare(Operation& operation);
  // Segments are independent: these four touch memory of theirs alone.
  void combine(Operation& operation, std::uint32_t segment);
  void append(Operation& operation, std::uint32_t segment);
  void scatter(Operation& operation, std::uint32_t segment, const Buffer& from);
  void place_final(Operation& operation, std::uint32_t segment, const Buffer& from);
  void pass_on(Operation& operation, Ready& ready);
  void segment_final(Operation& operation, std::uint32_t segment);
  void contribution(Operation& operation, std::uint32_t segment, std::uint32_t source,
                    Buffer buffer);
  void offer(Operation& operation, const PeerId& to, std::uint32_t segment, bool final);
  void post_receives(Operation& operation);
  void grant(Operation& operation, const PeerId& to, std::uint32_t credit);
  void await(Operation& operation, std::uint32_t rank);
  void hear(Operation& operation, std::uint32_t rank);
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
  // Whether results are the first frames to a peer, which may not have called yet.
  [[nodiscard]] static bool results_first(const Operation& operation) {
    return passes_inputs(operation.spec.what.kind);
  }
  // Whether a contribution is received in result memory. Only those of an all-to-all are.
  [[nodiscard]] static bool in_result(const Operation& operation, const Segment& segment,
                                      const Source& source) {
    return operation.spec.what.kind == Kind::all_to_all && !source.accumulated &&
           operation.schedule.chunks[segment.chunk].owner() && segment.piece_count <= kMaxPieces;
  }
  [[nodiscard]] static bool sendable(const Operation& operation, const Outlet& outlet);
  void queue_turn(const PeerId& to, Operation& operation, Outlet& outlet);
  void send_control(const PeerId& to, const link::FrameHeader& header);
  // The length on the wire: of a contribution to this rank, of this rank's, and of a result.
  [[nodiscard]] static std::uint32_t received_bytes(const Operation& operation,
                                                    std::uint32_t segment, const Source& source);
  [[nodiscard]] static std::uint32_t contributed_bytes(const Operation& operation,
                                                       std::uint32_t segment);
  [[nodiscard]] static std::uint32_t contribution_bytes(const Operation& operation,
                                                        std::uint32_t segment, std::uint32_t from,
                                                        std::uint32_t to, bool accumulated);
  [[nodiscard]] static std::uint32_t result_bytes(const Operation& operation,
                                                  std::uint32_t segment);
  // Whether contributions to `chunk` are encoded between these ranks.
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
  // The address of this rank's elements of a piece, and of its results. `from`: the rank that a
  // part of a result is from; the chunk for others than an all-to-all.
  [[nodiscard]] static const std::uint8_t* own_at(const Operation& operation, std::uint32_t chunk,
                                                  const Piece& piece);
  [[nodiscard]] static std::uint8_t* result_at(const Operation& operation, std::uint32_t from,
                                               const Piece& piece);
  // Receives a segment in its result memory.
  static void result_memory(const Operation& operation, const Segment& segment, std::uint32_t from,
                            link::Placement& placement);
  // Whether partial results of this segment cannot be kept in its result memory.
  [[nodiscard]] static bool apart(const Operation& operation, const Segment& segment);
  void final_bytes(Operation& operation, std::uint32_t segment, Buffer from);
  [[nodiscard]] std::uint32_t source_index(const Operation& operation, std::uint32_t segment,
                                           const PeerId& from) const;
  [[nodiscard]] Operation* find(const wire::OpKey& key);
  link::FrameHeader header_for(const Operation& operation, link::FrameType type) const;

  static constexpr std::uint32_t kUnlimited = std::numeric_limits<std::uint32_t>::max();
  static constexpr std::uint32_t kNoSource = std::numeric_limits<std::uint32_t>::max();
  // Segments of more pieces are gathered into one buffer; others are sent and received in place.
  static constexpr std::uint32_t kMaxPieces = 16;
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
  std::map<wire::OpKey, std::unique_ptr<Operation>> operations_;
  std::map<PeerId, EarlyPeer> early_;
  std::map<PeerId, Port> ports_;
};

}  // namespace pccl::collective
