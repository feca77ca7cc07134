// Processes of one host that are killed, or frozen and resumed, inside their reductions.
#pragma once

#include <cstdint>

namespace pccl::stress {

// Until `count` were hit inside a reduction. The exit status.
[[nodiscard]] int run_kills(std::uint64_t count, std::uint64_t seed);
[[nodiscard]] int run_freezes(std::uint64_t count, std::uint64_t seed);

}  // namespace pccl::stress
