// Random bytes that nobody can guess.
#pragma once

#include <cstdint>
#include <span>

namespace pccl::os {

// Fills `bytes`, at most 256, with random bytes from the kernel. Peer ids and relay tokens are made
// of them. False where the kernel or a sandbox has no such call. *any thread*
[[nodiscard]] bool fill_random(std::span<std::uint8_t> bytes);

}  // namespace pccl::os
