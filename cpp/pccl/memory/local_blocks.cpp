// LocalGroup: how ranks reduce arrays in blocks.
//
// The arrays, end to end, are cut into segments, which the ranks own in turn. In every round each
// rank copies the others' segments to its staging area, combines its own segment from theirs, and
// copies the others' results. A few rounds are in flight at a time, all of them in cache. Small
// arrays take one round.
#include <algorithm>
#include <utility>

#include "pccl/base/copy.h"
#include "pccl/memory/local_group.h"

namespace pccl::memory {
namespace {

constexpr std::uint64_t kMaxDepth = 4;
// Longest wait for memory that another rank has offered.
constexpr Duration kArrival = std::chrono::milliseconds(50);

}  // namespace

void LocalGroup::plan_blocks() {
  Current& current = *current_;
  const Operation& operation = operations_.at(current.key);
  const std::uint64_t ranks = boards_.size();
  const std::uint64_t fits =
      std::min<std::uint64_t>(kStageBytes / (2 * (ranks - 1)), kResultBytes / 2);
  // Small arrays have one block per rank: another round takes longer than overlap saves. Larger
  // ones have a few rounds, so that copying and combining overlap.
  const std::uint64_t share = (operation.bytes + ranks - 1) / ranks;
  const std::uint64_t wanted =
      share <= options_.least_segment_bytes
          ? (share + 63) / 64 * 64
          : std::clamp<std::uint64_t>(operation.bytes / (ranks * kMaxDepth),
                                      options_.least_segment_bytes, options_.segment_bytes);
  const auto segment = static_cast<std::uint32_t>(std::min(wanted, fits) / 64 * 64);
  std::vector<collective::ArrayShape> shapes;
  for (const collective::ArrayRef& array : operation.request.arrays)
    shapes.push_back({array.count, array.dtype});
  constexpr std::uint32_t kWhole = 1;
  current.layout = collective::cut(shapes, operation.request.op, std::span(&kWhole, 1), segment);
  current.stride = (segment + 63) / 64 * 64;
  current.rounds = (current.layout.segments.size() + ranks - 1) / ranks;
  current.depth = std::min(
      {kMaxDepth, kStageBytes / ((ranks - 1) * current.stride), kResultBytes / current.stride});
}

// Whether all arrays that are read directly are mapped here.
bool LocalGroup::arrays_here() {
  Current& current = *current_;
  if (current.mapped || (!current.direct_sends && !current.direct_recvs)) return true;
  const std::vector<collective::ArrayRef>& arrays = operations_.at(current.key).request.arrays;
  current.sends.resize(boards_.size());
  current.recvs.resize(boards_.size());
  for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
    if (rank == rank_ || !current.sends[rank].empty()) continue;
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
      const std::uint64_t bytes = arrays[i].count * element_size(arrays[i].dtype);
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
// rank may be gone, and the operation is spoilt.
bool LocalGroup::missing(Instant now) {
  if (!missing_since_) missing_since_ = now;
  if (now - *missing_since_ < kArrival) return false;
  spoil();
  return true;
}

bool LocalGroup::combine(Instant now) {
  if (!arrays_here()) return missing(now);
  if (gather_block() || reduce_block() || stage_block()) return true;
  Current& current = *current_;
  if (current.reduced < current.rounds || (!current.keep && current.gathered < current.rounds))
    return false;
  if (current.keep && !results_here()) {
    // Either not all ranks have all their results, or memory of one has not arrived.
    if (least(&Board::reduced) < current.rounds) return false;
    return missing(now);
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
    if (there != nullptr) continue;
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
  const Operation& operation = operations_.at(current.key);
  const std::uint64_t others = boards_.size() - 1;
  for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
    const std::uint64_t index = segment_of(current.staged, rank);
    if (rank == rank_ || index >= current.layout.segments.size()) continue;
    const std::uint64_t slot =
        current.staged % current.depth * others + (rank < rank_ ? rank : rank - 1);
    std::uint8_t* to = own().staging + slot * current.stride;
    const collective::Segment& segment = current.layout.segments[index];
    for (std::uint32_t p = 0; p < segment.piece_count; ++p) {
      const collective::Piece& piece = current.layout.pieces[segment.first_piece + p];
      const collective::ArrayRef& array = operation.request.arrays[piece.array];
      const std::size_t element = element_size(array.dtype);
      copy(to, static_cast<const std::uint8_t*>(array.send) + piece.first * element,
           piece.count * element);
      to += piece.count * element;
    }
    current.traffic.tx_bytes += segment.raw_bytes;
    moved_ += segment.raw_bytes;
  }
  publish(&Board::staged, ++current.staged);
  ring_all();
  return true;
}

bool LocalGroup::reduce_block() {
  Current& current = *current_;
  if (current.reduced == current.rounds) return false;
  if (!current.direct_sends &&
      (current.staged <= current.reduced || least(&Board::staged) <= current.reduced)) {
    return false;
  }
  if (!current.keep && !current.direct_recvs && current.reduced >= current.depth &&
      least(&Board::gathered) < current.reduced - current.depth + 1) {
    return false;
  }
  const std::uint64_t round = current.reduced;
  const std::uint64_t index = segment_of(round, rank_);
  if (current.direct_sends) {
    for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
      const std::uint64_t theirs = segment_of(round, rank);
      if (rank != rank_ && theirs < current.layout.segments.size())
        current.traffic.tx_bytes += current.layout.segments[theirs].raw_bytes;
    }
  }
  if (index < current.layout.segments.size()) {
    const Operation& operation = operations_.at(current.key);
    const collective::Segment& segment = current.layout.segments[index];
    const std::uint64_t others = boards_.size() - 1;
    std::uint8_t* const result = current.keep
                                     ? current.results[rank_]->data() + round * current.stride
                                     : own().results + round % current.depth * current.stride;
    std::size_t at = 0;
    for (std::uint32_t p = 0; p < segment.piece_count; ++p) {
      const collective::Piece& piece = current.layout.pieces[segment.first_piece + p];
      const collective::ArrayRef& array = operation.request.arrays[piece.array];
      const std::size_t element = element_size(array.dtype);
      contributions_.clear();
      for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
        if (rank == rank_) continue;
        const std::uint64_t slot =
            round % current.depth * others + (rank_ < rank ? rank_ : rank_ - 1);
        contributions_.push_back({current.direct_sends
                                      ? current.sends[rank][piece.array] + piece.first * element
                                      : board(rank).staging + slot * current.stride + at,
                                  false});
      }
      reduce::reduce(array.dtype, operation.request.op,
                     static_cast<const std::uint8_t*>(array.send) + piece.first * element,
                     contributions_, static_cast<unsigned>(boards_.size()),
                     current.direct_recvs
                         ? static_cast<std::uint8_t*>(array.recv) + piece.first * element
                         : result + at,
                     piece.count);
      at += piece.count * element;
    }
    publish(&Board::reduced, ++current.reduced);
    if (!current.keep && !current.direct_recvs) copy_out(index, result, rank_);
    moved_ += segment.raw_bytes;
  } else {
    publish(&Board::reduced, ++current.reduced);
  }
  ring_all();
  return true;
}

bool LocalGroup::gather_block() {
  Current& current = *current_;
  if (current.keep || current.gathered == current.rounds) return false;
  if (current.reduced <= current.gathered || least(&Board::reduced) <= current.gathered)
    return false;
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

// Copies a segment's result to the caller's arrays, from `from` or, with direct_recvs, from the
// arrays of `rank`.
void LocalGroup::copy_out(std::uint64_t index, const std::uint8_t* from, std::uint32_t rank) {
  const Current& current = *current_;
  const Operation& operation = operations_.at(current.key);
  const collective::Segment& segment = current.layout.segments[index];
  for (std::uint32_t p = 0; p < segment.piece_count; ++p) {
    const collective::Piece& piece = current.layout.pieces[segment.first_piece + p];
    const collective::ArrayRef& array = operation.request.arrays[piece.array];
    const std::size_t element = element_size(array.dtype);
    const std::size_t bytes = piece.count * element;
    std::uint8_t* const to = static_cast<std::uint8_t*>(array.recv) + piece.first * element;
    const std::uint8_t* const source =
        current.direct_recvs ? current.recvs[rank][piece.array] + piece.first * element : from;
    if (operation.bytes >= kPastCacheFrom) {
      copy_past_cache(to, source, bytes);
    } else {
      copy(to, source, bytes);
    }
    from += bytes;
  }
}

}  // namespace pccl::memory
