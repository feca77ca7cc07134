// The kinds of memory that one peer passes to another peer of its host.
#pragma once

#include <cstdint>

namespace pccl::memory {

// The use of the region.
enum class Offer : std::uint8_t {
  board,
  page,
  scratch,
  array,
  pipe,         // one end of a pipe, with a number of its maker; null: closed
  pipe_answer,  // the other end, with the same number
};

}  // namespace pccl::memory
