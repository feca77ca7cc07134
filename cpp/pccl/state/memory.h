// Where the elements of an array lie, and whether two arrays share some. Pure arithmetic.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace pccl::state {

// Equal: the same elements in the same order, so that a write of one is the same write of the
// other.
struct Memory {
  std::uint64_t address = 0;  // of the first element
  std::uint64_t item = 0;     // bytes of one element; 0: memory that nobody else has
  // (how many, bytes from one to the next), axis by axis, without those of one element.
  std::vector<std::pair<std::uint64_t, std::int64_t>> axes;
  std::string reading;   // how the elements are read, beside their dtype: byte order, conjugation
  bool written = false;  // new bytes go there
  auto operator<=>(const Memory&) const = default;
};

[[nodiscard]] Memory contiguous(const std::uint8_t* data, std::uint64_t bytes);

// [begin, end) of the bytes that it spans. REQUIRES: it has elements.
[[nodiscard]] std::pair<std::uint64_t, std::uint64_t> span_of(const Memory& memory);

// Whether some byte belongs to both. Layouts that would take too long to compare count as if so.
// REQUIRES: both have elements.
[[nodiscard]] bool overlap(const Memory& a, const Memory& b);

}  // namespace pccl::state
