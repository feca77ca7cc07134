// Processes of one host that are killed, or frozen and resumed, during reductions.
#pragma once

#include <cstdint>

namespace pccl::stress {

// Runs until `count` processes were hit during a reduction. Returns the exit status.
[[nodiscard]] int run_kills(std::uint64_t count, std::uint64_t seed);
[[nodiscard]] int run_freezes(std::uint64_t count, std::uint64_t seed);

}  // namespace pccl::stress
