// What one peer passes to another peer of its host.
#pragma once

#include <cstdint>

namespace pccl::memory {

// The use of a region that is passed on.
enum class Offer : std::uint8_t {
  board,
  page,
  scratch,
  array,
  pipe,         // one end of a pipe, by a number of its maker; null: it is closed
  pipe_answer,  // the other end, by the same number
};

}  // namespace pccl::memory
