// `cut` and `cut_parts` of schedule.h.
#include <algorithm>
#include <cassert>

#include "pccl/collective/schedule.h"

namespace pccl::collective {
namespace {

__extension__ using Wide = unsigned __int128;

// In bytes. Arrays are cut at its multiples: whole elements of every type, and whole cache lines of
// an aligned array.
constexpr std::uint64_t kGrain = 64;

constexpr std::uint64_t round_down(std::uint64_t bytes) { return bytes / kGrain * kGrain; }
constexpr std::uint64_t round_up(std::uint64_t bytes) { return round_down(bytes + kGrain - 1); }
constexpr std::uint64_t divide_up(std::uint64_t a, std::uint64_t b) { return a / b + (a % b > 0); }

// The permitted cut nearest to `offset` in an array of `size` bytes; the lower of two equally near
// ones.
std::uint64_t snap(std::uint64_t offset, std::uint64_t size) {
  const std::uint64_t below = round_down(offset);
  const std::uint64_t above = std::min(below + kGrain, size);
  return above - offset < offset - below ? above : below;
}

std::uint64_t byte_size(const ArrayShape& array) { return array.count * element_size(array.dtype); }

// Walks the line once, front to back. `array_` and `offset_` (bytes) are always a permitted cut.
class Cutter {
 public:
  Cutter(std::span<const ArrayShape> arrays, ReduceOp op, Layout& layout)
      : arrays_(arrays), op_(op), layout_(layout) {}

  // Appends segments of at most `limit` bytes for the next `bytes` of the line. REQUIRES: limit a
  // multiple of kGrain.
  void take_chunk(std::uint32_t chunk, std::uint64_t bytes, std::uint64_t limit) {
    if (bytes == 0) return;
    // Segments of equal size, not full ones and a rest: the last one to arrive completes the chunk.
    const std::uint64_t target = round_up(divide_up(bytes, divide_up(bytes, limit)));
    while (bytes > 0) bytes -= take_segment(chunk, std::min(bytes, target));
  }

 private:
  // Appends one segment of `bytes`, or of up to kGrain - 1 less to end at a permitted cut. Returns
  // its size.
  std::uint64_t take_segment(std::uint32_t chunk, std::uint64_t bytes) {
    Segment segment{.chunk = chunk,
                    .first_piece = static_cast<std::uint32_t>(layout_.pieces.size())};
    std::uint64_t taken = 0;
    while (taken < bytes) {
      const ArrayShape& array = arrays_[array_];
      const std::uint64_t rest = byte_size(array) - offset_;
      const std::uint64_t space = bytes - taken;
      const std::uint64_t piece = rest <= space ? rest : round_down(space);
      if (piece == 0 && rest > 0) break;
      if (piece > 0) {
        const std::uint64_t size = element_size(array.dtype);
        const std::uint64_t elements = piece / size;
        layout_.pieces.push_back({array_, offset_ / size, elements});
        segment.accumulated_bytes +=
            static_cast<std::uint32_t>(elements * accumulation_size(array.dtype, op_));
        taken += piece;
        offset_ += piece;
      }
      if (piece == rest) {
        ++array_;
        offset_ = 0;
      }
    }
    segment.piece_count = static_cast<std::uint32_t>(layout_.pieces.size()) - segment.first_piece;
    segment.raw_bytes = static_cast<std::uint32_t>(taken);
    layout_.segments.push_back(segment);
    return taken;
  }

  std::span<const ArrayShape> arrays_;
  ReduceOp op_;
  Layout& layout_;
  std::uint32_t array_ = 0;
  std::uint64_t offset_ = 0;
};

}  // namespace

Layout cut(std::span<const ArrayShape> arrays, ReduceOp op, std::span<const std::uint32_t> shares,
           std::uint32_t segment_bytes) {
  assert(segment_bytes >= kGrain && segment_bytes <= (1U << 24));
  std::uint64_t total = 0;
  for (const ArrayShape& array : arrays) total += byte_size(array);
  std::uint64_t share_total = 0;
  for (const std::uint32_t share : shares) share_total += share;
  assert(share_total > 0);

  Layout layout;
  Cutter cutter(arrays, op, layout);
  std::uint64_t share_sum = 0;
  std::uint64_t begin = 0;        // of the chunk, in the line
  std::size_t array = 0;          // the array in which the chunk ends
  std::uint64_t array_begin = 0;  // its start in the line
  for (std::uint32_t chunk = 0; chunk < shares.size(); ++chunk) {
    share_sum += shares[chunk];
    const auto ideal = static_cast<std::uint64_t>(Wide{total} * share_sum / share_total);
    while (array < arrays.size() && ideal - array_begin >= byte_size(arrays[array])) {
      array_begin += byte_size(arrays[array]);
      ++array;
    }
    const std::uint64_t end =
        array == arrays.size() ? total
                               : array_begin + snap(ideal - array_begin, byte_size(arrays[array]));
    cutter.take_chunk(chunk, end - begin, round_down(segment_bytes));
    begin = end;
  }
  return layout;
}

Layout cut_parts(std::span<const ArrayShape> arrays, ReduceOp op, std::uint32_t chunks,
                 std::uint32_t segment_bytes) {
  constexpr std::uint32_t kWhole = 1;
  Layout layout = cut(arrays, op, std::span(&kWhole, 1), segment_bytes);
  const std::size_t count = layout.segments.size();
  layout.segments.reserve(count * chunks);
  for (std::uint32_t chunk = 1; chunk < chunks; ++chunk) {
    for (std::size_t i = 0; i < count; ++i) {
      layout.segments.push_back(layout.segments[i]);
      layout.segments.back().chunk = chunk;
    }
  }
  return layout;
}

}  // namespace pccl::collective
