// LocalGroup: how ranks combine and exchange arrays in blocks.
//
// All-reduce: the arrays, end to end, are cut into segments, which the ranks own in turn. In every
// round each rank copies the others' segments to its staging area, combines its own segment from
// theirs, and copies the others' results. A few rounds are in flight at a time, all of them in
// cache. Small arrays take one round.
//
// The other collectives are parts of that. In a round of a reduce-scatter each rank combines one
// segment of its own part, which is its result; in an all-to-all it copies the others' segments. In
// a round of an all-gather the "result" of each rank is a segment of its own elements, and the
// others copy it; in a broadcast only the root has one.
#include <algorithm>
#include <cstring>
#include <utility>

#include "pccl/base/copy.h"
#include "pccl/memory/local_group.h"

namespace pccl::memory {
namespace {

constexpr std::uint64_t kMaxDepth = 4;
// Longest wait for memory that another rank has offered.
constexpr Duration kArrival = std::chrono::milliseconds(50);
constexpr std::uint64_t kNoSegment = ~std::uint64_t{0};

}  // namespace

using collective::Kind;

// The segment that `rank` owns in a round. May be past the last one.
std::uint64_t LocalGroup::segment_of(std::uint64_t round, std::uint32_t rank) const {
  if (what().kind == Kind::all_reduce) return round * boards_.size() + rank;
  return owns_results(rank) ? round : kNoSegment;
}

std::pair<std::uint32_t, std::uint64_t> LocalGroup::owner_of(std::uint64_t segment) const {
  if (what().kind == Kind::broadcast) return {what().root, segment};
  const std::uint64_t ranks = boards_.size();
  return {static_cast<std::uint32_t>(segment % ranks), segment / ranks};
}

bool LocalGroup::owns_results(std::uint32_t rank) const {
  return what().kind != Kind::broadcast || what().root == rank;
}

// Whether the others' inputs are results, and are read from their arrays.
bool LocalGroup::reads_inputs() const {
  return current_->direct_sends && collective::passes_inputs(what().kind);
}

void LocalGroup::plan_blocks() {
  Current& current = *current_;
  const Operation& operation = operations_.at(current.key);
  const Kind kind = what().kind;
  const std::uint64_t ranks = boards_.size();
  const std::uint64_t fits =
      std::min<std::uint64_t>(kStageBytes / (2 * (ranks - 1)), kResultBytes / 2);
  // Small arrays have one block per rank: another round takes longer than overlap saves. Larger
  // ones have a few rounds, so that copying and combining overlap.
  const std::uint64_t share = kind == Kind::all_reduce ? (operation.bytes + ranks - 1) / ranks
                                                       : operation.bytes / operation.request.parts;
  const std::uint64_t wanted =
      share <= options_.least_segment_bytes
          ? (share + 63) / 64 * 64
          : std::clamp<std::uint64_t>(share / kMaxDepth, options_.least_segment_bytes,
                                      options_.segment_bytes);
  const auto segment = static_cast<std::uint32_t>(std::min(wanted, fits) / 64 * 64);
  std::vector<collective::ArrayShape> shapes;
  for (const collective::ArrayRef& array : operation.request.arrays)
    shapes.push_back({array.count, array.dtype});
  constexpr std::uint32_t kWhole = 1;
  current.layout = collective::cut(shapes, operation.request.op, std::span(&kWhole, 1), segment);
  current.stride = (segment + 63) / 64 * 64;
  const std::uint64_t segments = current.layout.segments.size();
  current.rounds = kind == Kind::all_reduce ? (segments + ranks - 1) / ranks : segments;
  current.depth = std::min(
      {kMaxDepth, kStageBytes / ((ranks - 1) * current.stride), kResultBytes / current.stride});
  if (collective::passes_inputs(kind)) current.staged = current.rounds;
  if (!owns_results(rank_)) current.reduced = current.rounds;
  if (collective::scatters(kind) || (kind == Kind::broadcast && owns_results(rank_)))
    current.gathered = current.rounds;
}

// Whether all arrays that are read directly are mapped here.
bool LocalGroup::arrays_here() {
  Current& current = *current_;
  if (current.mapped || (!current.direct_sends && !current.direct_recvs)) return true;
  const LocalRequest& request = operations_.at(current.key).request;
  const std::vector<collective::ArrayRef>& arrays = request.arrays;
  current.sends.resize(boards_.size());
  current.recvs.resize(boards_.size());
  for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
    if (rank == rank_ || !owns_results(rank) || !current.sends[rank].empty()) continue;
    std::vector<const std::uint8_t*> sends;
    std::vector<const std::uint8_t*> recvs;
    const auto find = [&](std::uint64_t chunk, std::uint64_t offset, std::uint64_t bytes,
                          std::vector<const std::uint8_t*>& found) {
      const RegionPtr region = host_.array_of(rank, chunk);
      if (region == nullptr || offset > region->size() || bytes > region->size() - offset)
        return false;
      found.push_back(region->data() + offset);
      if (current.held.empty() || current.held.back() != region) current.held.push_back(region);
      return true;
    };
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      const std::uint64_t bytes = request.input_bytes(arrays[i]);
      const Spot& spot = current.spots[rank][i];
      if (bytes == 0 || !current.direct_sends) {
        sends.push_back(nullptr);
      } else if (!find(spot.send_chunk, spot.send_offset, bytes, sends)) {
        return false;
      }
      if (bytes == 0 || !current.direct_recvs) {
        recvs.push_back(nullptr);
      } else if (!find(spot.recv_chunk, spot.recv_offset, bytes, recvs)) {
        return false;
      }
    }
    current.sends[rank] = std::move(sends);
    current.recvs[rank] = std::move(recvs);
    missing_since_.reset();  // the next rank has its own time limit
  }
  current.mapped = true;
  return true;
}

// Another rank's memory is not here, though it was offered or will be at once. After kArrival that
// rank may be gone, and the operation is spoilt; at once if any memory could not be mapped.
bool LocalGroup::missing(bool unmapped, Instant now) {
  if (!missing_since_) missing_since_ = now;
  if (!unmapped && now - *missing_since_ < kArrival) return false;
  spoil();
  return true;
}

bool LocalGroup::combine(Instant now) {
  if (!arrays_here()) return missing(host_.unmapped().arrays, now);
  if (gather_block() || reduce_block() || stage_block()) return true;
  Current& current = *current_;
  if (current.reduced < current.rounds || (!current.keep && current.gathered < current.rounds))
    return false;
  if (current.keep && !results_here()) {
    // Either not all ranks have all their results, or memory of one has not arrived.
    if (least(&Board::reduced) < current.rounds) return false;
    return missing(host_.unmapped().scratch, now);
  }
  current.done = now;
  current.phase = Phase::finished;
  own().done.store(position(epoch_, index_), std::memory_order_release);
  ring_all();
  return true;
}

// Whether the memory with all ranks' results is mapped here. Then a commit's results can be read,
// whichever rank is killed.
bool LocalGroup::results_here() {
  Current& current = *current_;
  for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
    RegionPtr& there = current.results[rank];
    if (there != nullptr || !owns_results(rank)) continue;
    // The number is published before the last result.
    if (count_of(board(rank).reduced) < current.rounds) return false;
    there = host_.scratch_of(rank, board(rank).scratch.load(std::memory_order_relaxed));
    if (there != nullptr && there->size() < current.rounds * current.stride) there = nullptr;
    if (there == nullptr) return false;
  }
  return true;
}

bool LocalGroup::stage_block() {
  Current& current = *current_;
  if (current.direct_sends || current.staged == current.rounds) return false;
  if (current.staged >= current.depth &&
      least(&Board::reduced) < current.staged - current.depth + 1)
    return false;
  const std::uint64_t others = boards_.size() - 1;
  for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
    const std::uint64_t index = segment_of(current.staged, rank);
    if (rank == rank_ || index >= current.layout.segments.size()) continue;
    const std::uint64_t slot =
        current.staged % current.depth * others + (rank < rank_ ? rank : rank - 1);
    copy_in(index, own().staging + slot * current.stride, rank);
    const std::uint64_t bytes = current.layout.segments[index].raw_bytes;
    current.traffic.tx_bytes += bytes;
    moved_ += bytes;
  }
  publish(&Board::staged, ++current.staged);
  ring_all();
  return true;
}

// Makes this rank's result of a round.
bool LocalGroup::reduce_block() {
  Current& current = *current_;
  if (current.reduced == current.rounds) return false;
  if (!current.direct_sends &&
      (current.staged <= current.reduced || least(&Board::staged) <= current.reduced)) {
    return false;
  }
  const Kind kind = what().kind;
  const bool straight = current.direct_recvs || collective::scatters(kind);  // to the array
  const bool on_board = !current.keep && !straight && !reads_inputs();
  if (on_board && current.reduced >= current.depth &&
      least(&Board::gathered) < current.reduced - current.depth + 1) {
    return false;
  }
  const std::uint64_t round = current.reduced;
  const std::uint64_t index = segment_of(round, rank_);
  if (current.direct_sends && !collective::passes_inputs(kind)) {
    for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
      const std::uint64_t theirs = segment_of(round, rank);
      if (rank != rank_ && theirs < current.layout.segments.size())
        current.traffic.tx_bytes += current.layout.segments[theirs].raw_bytes;
    }
  }
  if (index >= current.layout.segments.size()) {
    publish(&Board::reduced, ++current.reduced);
    ring_all();
    return true;
  }
  const std::uint64_t bytes = current.layout.segments[index].raw_bytes;
  std::uint8_t* const result = current.keep
                                   ? current.results[rank_]->data() + round * current.stride
                                   : own().results + round % current.depth * current.stride;
  if (!collective::passes_inputs(kind)) {
    if (kind == Kind::all_to_all) {
      exchange_segment(index, round);
    } else {
      combine_segment(index, round, straight ? nullptr : result);
    }
    if (collective::scatters(kind)) current.traffic.rx_bytes += bytes * (boards_.size() - 1);
  } else {
    if (!reads_inputs()) copy_in(index, result, rank_);
    current.traffic.tx_bytes += bytes * (boards_.size() - 1);
  }
  publish(&Board::reduced, ++current.reduced);
  if (!current.keep && !straight) copy_out(index, result, rank_);
  moved_ += bytes;
  ring_all();
  return true;
}

// Combines all ranks' elements of an own segment. Null `to`: to the caller's arrays.
void LocalGroup::combine_segment(std::uint64_t index, std::uint64_t round, std::uint8_t* to) {
  const Current& current = *current_;
  const Operation& operation = operations_.at(current.key);
  const collective::Segment& segment = current.layout.segments[index];
  const bool parts = what().kind == Kind::reduce_scatter;
  std::size_t at = 0;
  for (const collective::Piece& piece : current.layout.pieces_of(segment)) {
    const collective::ArrayRef& array = operation.request.arrays[piece.array];
    const std::size_t element = element_size(array.dtype);
    const std::uint64_t input = (piece.first + (parts ? rank_ * array.count : 0)) * element;
    contributions_.clear();
    for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
      if (rank != rank_)
        contributions_.push_back({input_of(rank, piece.array, input, round, at), false});
    }
    reduce::reduce(
        array.dtype, operation.request.op, static_cast<const std::uint8_t*>(array.send) + input,
        contributions_, static_cast<unsigned>(boards_.size()),
        to == nullptr ? static_cast<std::uint8_t*>(array.recv) + piece.first * element : to + at,
        piece.count);
    at += piece.count * element;
  }
}

// Where another rank's elements for this rank are: at this byte of its array, or of its block.
const std::uint8_t* LocalGroup::input_of(std::uint32_t rank, std::uint32_t array,
                                         std::uint64_t in_array, std::uint64_t round,
                                         std::uint64_t in_block) const {
  const Current& current = *current_;
  if (current.direct_sends) return current.sends[rank][array] + in_array;
  const std::uint64_t slot =
      round % current.depth * (boards_.size() - 1) + (rank_ < rank ? rank_ : rank_ - 1);
  return board(rank).staging + slot * current.stride + in_block;
}

// All-to-all: copies all ranks' elements of a segment of this rank's part to the caller's arrays.
void LocalGroup::exchange_segment(std::uint64_t index, std::uint64_t round) {
  const Current& current = *current_;
  const Operation& operation = operations_.at(current.key);
  const collective::Segment& segment = current.layout.segments[index];
  const bool past_cache = operation.bytes >= kPastCacheFrom;
  std::size_t at = 0;
  for (const collective::Piece& piece : current.layout.pieces_of(segment)) {
    const collective::ArrayRef& array = operation.request.arrays[piece.array];
    const std::size_t element = element_size(array.dtype);
    const std::uint64_t input = (piece.first + rank_ * array.count) * element;
    for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
      const std::uint8_t* const from = rank == rank_
                                           ? static_cast<const std::uint8_t*>(array.send) + input
                                           : input_of(rank, piece.array, input, round, at);
      std::uint8_t* const to =
          static_cast<std::uint8_t*>(array.recv) + (piece.first + rank * array.count) * element;
      if (past_cache) {
        copy_past_cache(to, from, piece.count * element);
      } else {
        copy(to, from, piece.count * element);
      }
    }
    at += piece.count * element;
  }
}

bool LocalGroup::gather_block() {
  Current& current = *current_;
  if (current.keep || current.gathered == current.rounds) return false;
  if (!reads_inputs() &&
      (current.reduced <= current.gathered || least(&Board::reduced) <= current.gathered)) {
    return false;
  }
  for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
    const std::uint64_t index = segment_of(current.gathered, rank);
    if (rank == rank_ || index >= current.layout.segments.size()) continue;
    copy_out(index, board(rank).results + current.gathered % current.depth * current.stride, rank);
    current.traffic.rx_bytes += current.layout.segments[index].raw_bytes;
    moved_ += current.layout.segments[index].raw_bytes;
  }
  publish(&Board::gathered, ++current.gathered);
  ring_all();
  return true;
}

// Copies this rank's elements of a segment to `to`: of the part of `rank` if there are parts.
void LocalGroup::copy_in(std::uint64_t index, std::uint8_t* to, std::uint32_t rank) {
  const Current& current = *current_;
  const LocalRequest& request = operations_.at(current.key).request;
  const collective::Segment& segment = current.layout.segments[index];
  for (const collective::Piece& piece : current.layout.pieces_of(segment)) {
    const collective::ArrayRef& array = request.arrays[piece.array];
    const std::size_t element = element_size(array.dtype);
    const std::uint64_t first =
        piece.first + (collective::scatters(request.what.kind) ? rank * array.count : 0);
    copy(to, static_cast<const std::uint8_t*>(array.send) + first * element, piece.count * element);
    to += piece.count * element;
  }
}

// Copies a segment's result to the caller's arrays: from `from`, or from the arrays of `rank` where
// these are read directly.
void LocalGroup::copy_out(std::uint64_t index, const std::uint8_t* from, std::uint32_t rank) {
  const Current& current = *current_;
  const Operation& operation = operations_.at(current.key);
  const collective::Segment& segment = current.layout.segments[index];
  const bool gathers = what().kind == Kind::all_gather;
  const bool past_cache = operation.bytes * (gathers ? boards_.size() : 1) >= kPastCacheFrom;
  for (const collective::Piece& piece : current.layout.pieces_of(segment)) {
    const collective::ArrayRef& array = operation.request.arrays[piece.array];
    const std::size_t element = element_size(array.dtype);
    const std::size_t bytes = piece.count * element;
    const std::size_t at = piece.first * element;
    std::uint8_t* const to =
        static_cast<std::uint8_t*>(array.recv) + at + (gathers ? rank * array.count * element : 0);
    const std::uint8_t* source = from;
    if (current.direct_recvs) {
      source = current.recvs[rank][piece.array] + at;
    } else if (reads_inputs()) {
      source = rank == rank_ ? static_cast<const std::uint8_t*>(array.send) + at
                             : current.sends[rank][piece.array] + at;
    }
    const bool there = !collective::reduces(what().kind) && rank == rank_ &&
                       to == static_cast<const std::uint8_t*>(array.send) + at;
    if (there) {
      // The elements are in place already.
    } else if (past_cache) {
      copy_past_cache(to, source, bytes);
    } else {
      copy(to, source, bytes);
    }
    from += bytes;
  }
}

// Small arrays: makes the results from all ranks' inputs, which came with their arrivals.
void LocalGroup::combine_inlined() {
  Current& current = *current_;
  const LocalRequest& request = operations_.at(current.key).request;
  const Kind kind = request.what.kind;
  const auto ranks = static_cast<std::uint32_t>(boards_.size());
  std::size_t at = 0;
  for (const collective::ArrayRef& array : request.arrays) {
    const std::size_t bytes = array.count * element_size(array.dtype);
    if (bytes == 0) continue;
    auto* const to = static_cast<std::uint8_t*>(array.recv);
    if (kind == Kind::all_gather) {
      for (std::uint32_t rank = 0; rank < ranks; ++rank)
        std::memcpy(to + rank * bytes, others_[rank].inlined + at, bytes);
    } else if (kind == Kind::all_to_all) {
      for (std::uint32_t rank = 0; rank < ranks; ++rank)
        std::memcpy(to + rank * bytes, others_[rank].inlined + at + rank_ * bytes, bytes);
    } else if (kind == Kind::broadcast) {
      std::memcpy(to, others_[request.what.root].inlined + at, bytes);
    } else {
      // All ranks combine in the same order, so all get the same bytes.
      const std::size_t part = kind == Kind::reduce_scatter ? rank_ * bytes : 0;
      contributions_.clear();
      for (std::uint32_t rank = 1; rank < ranks; ++rank)
        contributions_.push_back({others_[rank].inlined + at + part, false});
      reduce::reduce(array.dtype, request.op, others_[0].inlined + at + part, contributions_, ranks,
                     to, array.count);
    }
    at += request.input_bytes(array);
  }
  const std::uint64_t others = at / request.parts * (ranks - 1);
  current.traffic = {.tx_bytes = others, .rx_bytes = others};
  if (kind == Kind::all_reduce) current.traffic.tx_bytes = at;
  if (kind == Kind::broadcast && request.what.root == rank_) current.traffic.rx_bytes = 0;
  if (kind == Kind::broadcast && request.what.root != rank_)
    current.traffic = {.tx_bytes = 0, .rx_bytes = at};
  moved_ += at;
}

}  // namespace pccl::memory
