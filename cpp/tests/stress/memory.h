// The protocols of shared memory among threads that map it at one address.
#pragma once

#include <cstdint>

#include "pccl/base/ids.h"

namespace pccl::stress {

// Reduces among ranks, then moves bytes through a pipe, for that long together. Returns the exit
// status.
[[nodiscard]] int run_memory(Duration length, std::uint64_t seed);

}  // namespace pccl::stress
