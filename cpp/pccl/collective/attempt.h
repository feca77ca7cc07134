// One attempt at an operation, while it runs: its schedule, its cut into segments, and what has
// arrived. Where the elements of a segment are, and how many bytes it has on the wire.
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
#include "pccl/collective/schedule.h"
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

// Segments of more pieces are gathered into one buffer; others are sent and received in place.
inline constexpr std::uint32_t kMaxPieces = 16;
inline constexpr std::uint32_t kNoSource = std::numeric_limits<std::uint32_t>::max();

// The most segments in a window, and how many a rank may be ahead of what it combines.
[[nodiscard]] std::uint32_t max_window(std::uint64_t segment_bytes);

struct HeldContribution {
  std::uint32_t source = 0;  // index into the flow's sources
  Buffer buffer;
};
struct SegmentState {
  std::vector<HeldContribution> held;  // contributions that wait for others
  std::vector<bool> seen;              // by source
  std::uint32_t missing = 0;           // contributions still to come or, if one, to be combined
  bool arrived = false;                // final bytes are here
  bool finished = false;               // final bytes are in place
  std::uint32_t place = 0;             // index in its chunk
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
struct RunningAttempt {
  OperationSpec spec;
  std::uint64_t token = 0;
  Schedule schedule;
  Layout layout;
  std::vector<SegmentState> segments;
  std::size_t unfinished = 0;  // segments without final bytes
  // By place in their chunks: the number of segments that this rank has yet to combine with
  // contributions.
  std::vector<std::uint32_t> to_combine;
  std::uint32_t combining = 0;     // the first place where to_combine is not 0
  Buffer scratch;                  // results of in-place arrays until the commit
  std::vector<std::uint8_t*> out;  // by array: where results go
  std::vector<Buffer> partials;    // by segment, where apart() is true: until it is sent
  std::vector<CodedBytes> coded;   // quantized: by segment
  std::vector<Buffer> results;     // quantized: by segment, encoded
  std::vector<Buffer> residuals;   // quantized: by array, the new ones, until the commit
  bool straight = false;           // quantized: no ring: contributions to other hosts are encoded
  bool regional = false;           // quantized: contributions are combined by regions
  std::map<PeerId, Outlet> outlets;
  std::map<PeerId, std::uint32_t> ranks;
  std::vector<bool> awaited;  // by rank: it will send, and nothing has come from it yet
  std::uint32_t unheard = 0;  // how many ranks are awaited
  std::map<PeerId, std::uint32_t> window;  // by contributor: segments that it may have in flight
  // By contributor with a window: segments granted that have not arrived.
  std::map<PeerId, std::uint32_t> granted;
  BytesMoved traffic;

  // -- lengths on the wire: a contribution to this rank, one that it sends, and a result
  [[nodiscard]] std::uint32_t received_bytes(std::uint32_t segment, const Source& source) const;
  [[nodiscard]] std::uint32_t contributed_bytes(std::uint32_t segment) const;
  [[nodiscard]] std::uint32_t result_bytes(std::uint32_t segment) const;
  // The bytes that `rank` may have to send before it knows that this member has called.
  [[nodiscard]] std::uint64_t unasked_bytes_from(std::uint32_t rank) const;
  // Whether contributions to `chunk` are encoded between these ranks.
  [[nodiscard]] bool is_coded(std::uint32_t chunk, std::uint32_t from, std::uint32_t to) const;

  // -- where elements are
  // The address of this rank's elements of a piece, and of its results. `from`: the rank that a
  // part of a result is from; the chunk for others than an all-to-all.
  [[nodiscard]] const std::uint8_t* own_at(std::uint32_t chunk, const Piece& piece) const;
  [[nodiscard]] std::uint8_t* result_at(std::uint32_t from, const Piece& piece) const;
  // Receives a segment in its result memory.
  void result_memory(const Segment& segment, std::uint32_t from, link::Placement& placement) const;
  // Whether a contribution is received in result memory. Only those of an all-to-all are.
  [[nodiscard]] bool in_result(const Segment& segment, const Source& source) const {
    return spec.what.kind == Kind::all_to_all && !source.accumulated &&
           schedule.chunks[segment.chunk].owner() && segment.piece_count <= kMaxPieces;
  }
  // Whether partial results of this segment cannot be kept in its result memory.
  [[nodiscard]] bool apart(const Segment& segment) const {
    return scatters(spec.what.kind) || segment.accumulated_bytes != segment.raw_bytes;
  }

  // -- what may be sent, and what may come
  // Whether results are the first frames to a peer, which may not have called yet.
  [[nodiscard]] bool results_first() const { return passes_inputs(spec.what.kind); }
  [[nodiscard]] bool sendable(const Outlet& outlet) const;
  // kNoSource: the peer contributes nothing to this segment.
  [[nodiscard]] std::uint32_t source_index(std::uint32_t segment, const PeerId& from) const;
  [[nodiscard]] link::FrameHeader header(link::FrameType type) const {
    return {.type = type, .signature = spec.signature, .key = spec.key, .attempt = spec.attempt};
  }

 private:
  [[nodiscard]] std::uint32_t contribution_bytes(std::uint32_t segment, std::uint32_t from,
                                                 std::uint32_t to, bool accumulated) const;
};

}  // namespace pccl::collective
