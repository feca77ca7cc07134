// Schedules: which bytes one rank sends and receives in a collective operation, as data. Pure
// arithmetic: no sockets, no threads.
//
// An operation's arrays are laid end to end as one line of elements and cut into chunks (one owner
// each) and chunks into segments (the unit in flight). A schedule says, per chunk, whose
// contributions this rank combines with its own, where the partial result goes, where the final one
// comes from and to whom it is passed on. `ring`, `direct` and every tree are instances of that one
// form, so one executor runs them all.
#pragma once

#include <cstddef>
#include <cstdint>
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
  broadcast = 3
};

[[nodiscard]] const char* name(Kind kind);  // "all_reduce"

// Whether elements of several members are combined.
[[nodiscard]] constexpr bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce_scatter;
}

// A contribution this rank receives for a chunk.
struct Source {
  std::uint32_t rank = kNobody;
  bool accumulated =
      false;  // it is a partial result in the accumulation type, not the sender's raw elements
  // May be told to wait until there is room. False: everybody's memory would wait for everybody's.
  bool windowed = true;
  bool operator==(const Source&) const = default;
};

// What one rank does with one chunk. Own elements first, then `sources` in order, are combined; the
// owner's result is final, everybody else's is partial.
struct ChunkFlow {
  std::vector<Source>
      sources;  // contributions to wait for, in the order in which they are combined
  std::uint32_t partial_to = kNobody;   // where the combined partial goes; kNobody on the owner
  std::uint32_t final_from = kNobody;   // who sends the final bytes; kNobody on the owner
  std::vector<std::uint32_t> final_to;  // to whom this rank passes the final bytes on
  // The journey starts here and goes to where no window bounds it: not to be sent much earlier than
  // what this rank combines of other chunks.
  bool paced = false;
  [[nodiscard]] bool owner() const { return partial_to == kNobody && final_from == kNobody; }
  // This rank ends with the final bytes.
  [[nodiscard]] bool ends_here() const { return owner() || final_from != kNobody; }
  bool operator==(const ChunkFlow&) const = default;
};

// One rank's part of an operation: a flow per chunk. `shares[c]` is chunk c's weight in the cut
// (see `cut`).
struct Schedule {
  std::vector<ChunkFlow> chunks;
  std::vector<std::uint32_t> shares;
};

// The ring of `order.size()` ranks; order[position] = rank. Chunk c is owned by the rank at
// position c; its partial result starts at position c+1, travels once around and ends at c; the
// final bytes travel once around from there. 2(n-1)/n of the array leaves each rank;
// bandwidth-optimal (Patarasuk & Yuan, JPDC 2009). REQUIRES: order is a permutation of 0..n-1, rank
// < n, n >= 1.
[[nodiscard]] Schedule ring(std::span<const std::uint32_t> order, std::uint32_t rank);

// Everybody sends its raw elements of chunk c to rank c, which combines them in rank order (its own
// first, then the others ascending) and sends the final bytes to all. Two hops whatever n is.
// `shares` are the chunks' weights; a zero share is an empty chunk. REQUIRES: shares.size() = n, at
// least one share > 0, rank < n.
[[nodiscard]] Schedule direct(std::span<const std::uint32_t> shares, std::uint32_t rank);

// Several ranks on some of several hosts. Chunk c is owned by rank c; every host has a delegate for
// it (topology::Delegates), which combines its neighbours' raw elements with its own. Partial
// results then go from delegate to delegate around a ring of hosts that ends with the owner's
// (`around`), or straight to the owner, and the final bytes come back the same way and from the
// delegates to their neighbours. So 2(h-1)/h of the array leaves each of h equal hosts, however
// many ranks it has, and on equal hosts every rank carries its part of that. REQUIRES: hosts hold
// 0..n-1, n = shares.size(), at least one share > 0, rank < n.
[[nodiscard]] Schedule by_hosts(const topology::HostRanks& hosts,
                                std::span<const std::uint32_t> shares, bool around,
                                std::uint32_t rank);

// Regions of hosts, of several or of one rank each. Chunk c is owned by rank c, and its
// contributions meet on every host, then in every region, and go from there to the owner; the
// final bytes come back the same way (topology::Tree). So each of r equal regions sends the others
// 2 (r-1)/r of the array, however many ranks it has, where `direct` would send as much for each
// host. REQUIRES: places hold 0..n-1, n = shares.size(), at least one share > 0, rank < n.
[[nodiscard]] Schedule by_regions(const topology::Hierarchy& levels,
                                  std::span<const std::uint32_t> shares, std::uint32_t rank);

// Chunk c is owned by rank c, and `hub` combines all that goes there and passes on all that comes
// from there: for ranks that have a link to it, and perhaps no other. REQUIRES: rank, hub < ranks;
// ranks > 2.
[[nodiscard]] Schedule through(std::uint32_t hub, std::size_t ranks, std::uint32_t rank);

// Halves of an all-reduce, in which rank owners[c] owns chunk c. Of the halves it owns chunk
// owners[c], all equal: nothing but contributions travels, or nothing but results.
[[nodiscard]] Schedule reduce_scatter(const Schedule& all_reduce,
                                      std::span<const std::uint32_t> owners);
[[nodiscard]] Schedule all_gather(const Schedule& all_reduce,
                                  std::span<const std::uint32_t> owners);
// The way of the results of the chunk that `root` owns, as the only chunk.
[[nodiscard]] Schedule broadcast(const Schedule& all_reduce, std::span<const std::uint32_t> owners,
                                 std::uint32_t root);

// Which collective: `root` is the rank that a broadcast comes from.
struct Collective {
  Kind kind = Kind::all_reduce;
  std::uint32_t root = 0;
};

// The schedule for operations of `bytes` in that size class; of halves, in the class that
// topology::all_owning has for it.
[[nodiscard]] Schedule make_schedule(const wire::Plan& plan, const wire::SizeClass& size,
                                     std::uint32_t rank, const Collective& what = {},
                                     std::uint64_t bytes = 0);

// A run of elements of one array.
struct Piece {
  std::uint32_t array = 0;  // index into the operation's arrays
  std::uint64_t first = 0;  // element
  std::uint64_t count = 0;  // elements, > 0
  bool operator==(const Piece&) const = default;
};

// One array's size as the cut sees it.
struct ArrayShape {
  std::uint64_t count = 0;  // elements
  DataType dtype = DataType::float32;
};

// The unit in flight: a list of pieces of one chunk.
struct Segment {
  std::uint32_t chunk = 0;
  std::uint32_t first_piece = 0;  // into Layout::pieces
  std::uint32_t piece_count = 0;
  std::uint32_t raw_bytes = 0;          // on the wire as elements
  std::uint32_t accumulated_bytes = 0;  // on the wire in the accumulation type
  bool operator==(const Segment&) const = default;
};

// The whole cut of an operation, equal on all members.
struct Layout {
  std::vector<Piece> pieces;      // in line order; every element in exactly one
  std::vector<Segment> segments;  // in line order; never empty ones, so an empty operation has none
};

// Cuts the arrays' line into shares.size() chunks whose byte sizes are proportional to the shares
// (boundaries fall on multiples of 64 bytes of an array, or on an array's ends), and those into
// segments of at most `segment_bytes` raw bytes (at least one element each; a piece never crosses
// an array's end, a segment may hold pieces of many arrays). Integer arithmetic only: the same on
// every machine. Totals up to 2^60 bytes. REQUIRES: segment_bytes in [64, 2^24], at least one share
// > 0.
[[nodiscard]] Layout cut(std::span<const ArrayShape> arrays, ReduceOp op,
                         std::span<const std::uint32_t> shares, std::uint32_t segment_bytes);

// The same for operations in which chunk c is all of rank c's `arrays` (an all-gather), or what
// rank c keeps of everybody's (a reduce-scatter): every chunk holds every piece, and pieces count
// elements from where the chunk's part of an array begins.
[[nodiscard]] Layout cut_parts(std::span<const ArrayShape> arrays, ReduceOp op,
                               std::uint32_t chunks, std::uint32_t segment_bytes);

}  // namespace pccl::collective
