// Schedules: which bytes one rank sends and receives in a collective operation, as data. Pure
// arithmetic: no sockets, no threads.
//
// An operation's arrays are laid end to end as one line of elements. The line is cut into chunks
// (one owner each), and every chunk into segments (the unit in flight). For each chunk a schedule
// lists the contributions that this rank combines with its own elements, the receiver of the
// partial result, the sender of the final result, and the ranks to which this rank passes it on.
// `ring`, `direct` and every tree have this form, so one executor runs them all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "pccl/base/dtype.h"
#include "pccl/topology/plan.h"
#include "pccl/wire/records.h"

namespace pccl::collective {

inline constexpr std::uint32_t kNobody = 0xffffffff;

enum class Kind : std::uint8_t {
  all_reduce = 0,
  reduce_scatter = 1,
  all_gather = 2,
  broadcast = 3,
  all_to_all = 4
};
inline constexpr int kKindCount = 5;

[[nodiscard]] const char* name(Kind kind);  // "all_reduce"

// Whether elements of several members are combined.
[[nodiscard]] constexpr bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce_scatter;
}
// Whether an input has a part for each member.
[[nodiscard]] constexpr bool scatters(Kind kind) {
  return kind == Kind::reduce_scatter || kind == Kind::all_to_all;
}
// Whether a result has a part from each member.
[[nodiscard]] constexpr bool gathers(Kind kind) {
  return kind == Kind::all_gather || kind == Kind::all_to_all;
}
// Whether inputs are results: nothing is contributed to a chunk by others than its owner.
[[nodiscard]] constexpr bool passes_inputs(Kind kind) {
  return kind == Kind::all_gather || kind == Kind::broadcast;
}

// A contribution that this rank receives for a chunk.
struct Source {
  std::uint32_t rank = kNobody;
  bool accumulated = false;  // true: a partial result in the accumulation type; false: elements
  // The receiver may bound it by a window. False where windows could wait for each other in a
  // circle.
  bool windowed = true;
  // All-to-all: the ranks whose elements it holds, in this order.
  std::vector<std::uint32_t> ranks = {};
};

// One rank's part in one chunk. The rank combines its own elements first, then `sources` in order.
// The owner's result is final; all others are partial.
struct ChunkFlow {
  std::vector<Source> sources;          // in the order in which they are combined
  std::uint32_t partial_to = kNobody;   // receiver of the partial result; kNobody on the owner
  std::uint32_t final_from = kNobody;   // sender of the final bytes; kNobody on the owner
  std::vector<std::uint32_t> final_to;  // ranks to which this rank passes the final bytes on
  // The chunk starts at this rank, and no window bounds what the rank sends. It must not send much
  // earlier than it combines segments of other chunks.
  bool paced = false;
  [[nodiscard]] bool owner() const { return partial_to == kNobody && final_from == kNobody; }
  // Whether this rank gets the final bytes.
  [[nodiscard]] bool ends_here() const { return owner() || final_from != kNobody; }
};

// One rank's part of an operation: a flow per chunk. `shares[c]` is chunk c's weight in the cut
// (see `cut`).
struct Schedule {
  std::vector<ChunkFlow> chunks;
  std::vector<std::uint32_t> shares;
  // All-to-all: a contribution holds the elements of at most so many ranks.
  std::uint32_t most_ranks = 1;
};

// The ring of n = order.size() ranks; order[position] = rank. The rank at position c owns chunk c.
// The partial result starts at position c+1, travels once around and ends at c. The final bytes
// travel once around from there. Each rank sends 2(n-1)/n of the array, which is bandwidth-optimal
// (Patarasuk & Yuan, JPDC 2009). REQUIRES: order is a permutation of 0..n-1, rank < n, n >= 1.
[[nodiscard]] Schedule ring(std::span<const std::uint32_t> order, std::uint32_t rank);

// All ranks send their raw elements of chunk c to rank c. Rank c combines them in rank order (its
// own first, then the others ascending) and sends the final bytes to all. Two hops for any n.
// `shares` are the chunks' weights; a chunk with share 0 is empty. REQUIRES: shares.size() = n, at
// least one share > 0, rank < n.
[[nodiscard]] Schedule direct(std::span<const std::uint32_t> shares, std::uint32_t rank);

// For several hosts, some of them with several ranks. Rank c owns chunk c. Every host has a
// delegate for the chunk (topology::Delegates), which combines its neighbours' raw elements with
// its own. With `around`, partial results go from delegate to delegate around a ring of hosts that
// ends with the owner's, and the final bytes travel once around from there. Otherwise both go
// straight between delegates and owner. Delegates pass the final bytes to their neighbours. Each of
// h equal hosts sends 2(h-1)/h of the array, however many ranks it has, and its ranks share this
// equally. REQUIRES: hosts hold 0..n-1, n = shares.size(), at least one share > 0, rank < n.
[[nodiscard]] Schedule by_hosts(const topology::HostRanks& hosts,
                                std::span<const std::uint32_t> shares, bool around,
                                std::uint32_t rank);

// For regions of hosts with one or several ranks each. Rank c owns chunk c. Its contributions are
// combined on every host, then in every region, then at the owner; the final bytes return by the
// same path (topology::Tree). Each of r equal regions sends the others 2(r-1)/r of the array,
// however many ranks it has. `direct` would send as much for each host. REQUIRES: hosts hold
// 0..n-1, n = shares.size(), at least one share > 0, rank < n.
[[nodiscard]] Schedule by_regions(const topology::Hierarchy& levels,
                                  std::span<const std::uint32_t> shares, std::uint32_t rank);

// For ranks that may have no link but the one to `hub`. Rank c owns chunk c. The hub combines the
// contributions on their way to an owner, and passes on the owner's final bytes. REQUIRES: rank,
// hub < ranks; ranks > 2.
[[nodiscard]] Schedule through(std::uint32_t hub, std::size_t ranks, std::uint32_t rank);

// The halves of `all_reduce`, a schedule in which rank owners[c] owns chunk c: its contributions
// without its results, and its results without its contributions. In both halves rank r owns chunk
// r, and all chunks have equal shares.
[[nodiscard]] Schedule reduce_scatter(const Schedule& all_reduce,
                                      std::span<const std::uint32_t> owners);
[[nodiscard]] Schedule all_gather(const Schedule& all_reduce,
                                  std::span<const std::uint32_t> owners);
// The path of the results of the chunk that `root` owns, as the only chunk.
[[nodiscard]] Schedule broadcast(const Schedule& all_reduce, std::span<const std::uint32_t> owners,
                                 std::uint32_t root);

// An all-to-all: a reduce-scatter that appends the elements of its ranks instead of combining them.
// `half`: the reduce-scatter of a rank. A contribution holds the elements of at most `most` ranks.
[[nodiscard]] Schedule all_to_all(const std::function<Schedule(std::uint32_t)>& half,
                                  std::uint32_t rank, std::uint32_t most);

// A kind of collective. `root`: the rank that a broadcast comes from.
struct Collective {
  Kind kind = Kind::all_reduce;
  std::uint32_t root = 0;
};

// The schedule for operations of `bytes` bytes in the class `size`. Kinds other than all_reduce use
// the class topology::all_owning(plan, size).
[[nodiscard]] Schedule make_schedule(const wire::Plan& plan, const wire::SizeClass& size,
                                     std::uint32_t rank, const Collective& what = {},
                                     std::uint64_t bytes = 0);

// A run of elements of one array.
struct Piece {
  std::uint32_t array = 0;  // index into the operation's arrays
  std::uint64_t first = 0;  // element
  std::uint64_t count = 0;  // elements, > 0
};

// One array's size.
struct ArrayShape {
  std::uint64_t count = 0;  // elements
  DataType dtype = DataType::float32;
};

// The unit in flight: a list of pieces of one chunk.
struct Segment {
  std::uint32_t chunk = 0;
  std::uint32_t first_piece = 0;  // into Layout::pieces
  std::uint32_t piece_count = 0;
  std::uint32_t raw_bytes = 0;          // on the wire, as elements
  std::uint32_t accumulated_bytes = 0;  // on the wire, in the accumulation type
};

// The whole cut of an operation, equal on all members.
struct Layout {
  std::vector<Piece> pieces;      // in line order; every element in exactly one
  std::vector<Segment> segments;  // in line order; none is empty, so an empty operation has none
  [[nodiscard]] std::span<const Piece> pieces_of(const Segment& segment) const {
    return std::span(pieces).subspan(segment.first_piece, segment.piece_count);
  }
};

// Cuts the line of arrays into shares.size() chunks, whose byte sizes are proportional to the
// shares, and each chunk into segments of at most `segment_bytes` raw bytes. An array is cut only
// at multiples of 64 bytes from its start. A segment has at least one element and may hold pieces
// of many arrays; a piece never crosses an array's end. Integer arithmetic only: the same on every
// machine. Totals up to 2^60 bytes. REQUIRES: segment_bytes in [64, 2^24], at least one share > 0.
[[nodiscard]] Layout cut(std::span<const ArrayShape> arrays, ReduceOp op,
                         std::span<const std::uint32_t> shares, std::uint32_t segment_bytes);

// The same for an all-gather, where chunk c is all of rank c's `arrays`, and for a reduce-scatter
// or an all-to-all, where chunk c is the part of all ranks' arrays that rank c receives. Every
// chunk has the same pieces. They count elements from the start of the chunk's part of an array.
[[nodiscard]] Layout cut_parts(std::span<const ArrayShape> arrays, ReduceOp op,
                               std::uint32_t chunks, std::uint32_t segment_bytes);

}  // namespace pccl::collective
