// How work that is done step by step wants to go on.
#pragma once

#include <cstdint>

namespace pccl {

enum class Pace : std::uint8_t {
  working,   // something moved: again, soon
  spinning,  // another process is to move, any moment now, on another core
  yielding,  // the same, but it may need this core
  idle,      // nothing to do before the next event
};

}  // namespace pccl
