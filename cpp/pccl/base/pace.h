// When to call a stepwise worker again.
#pragma once

#include <cstdint>

namespace pccl {

enum class Pace : std::uint8_t {
  working,   // made progress: call again soon
  spinning,  // waits for another process that runs on another core
  yielding,  // waits for another process that may need this core
  idle,      // nothing to do before the next event
};

}  // namespace pccl
