// The layout of an array in memory, and whether two arrays overlap. Pure arithmetic.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace pccl::state {

// Equal layouts are the same elements in the same order: writing one writes the other.
struct Memory {
  std::uint64_t address = 0;  // of the first element
  std::uint64_t item = 0;     // bytes of one element; 0: private memory, which overlaps nothing
  // (count, stride in bytes) of each axis that has more than one element.
  std::vector<std::pair<std::uint64_t, std::int64_t>> axes;
  std::string reading;   // how elements are read, beside their dtype: byte order, conjugation
  bool written = false;  // the sync may write new bytes here
  auto operator<=>(const Memory&) const = default;
};

[[nodiscard]] Memory contiguous(const std::uint8_t* data, std::uint64_t bytes);

// The bytes that the array spans: [begin, end). REQUIRES: it has elements.
[[nodiscard]] std::pair<std::uint64_t, std::uint64_t> span_of(const Memory& memory);

// Whether some byte belongs to both. True for layouts that would take too long to compare.
// REQUIRES: both have elements.
[[nodiscard]] bool overlap(const Memory& a, const Memory& b);

}  // namespace pccl::state
