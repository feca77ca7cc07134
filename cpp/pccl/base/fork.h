// Fork support. A forked child has copies of all descriptors and engine objects, but none of the
// engine's threads. The child closes its copies of the descriptors at once, without a shutdown that
// would affect the parent's connections. It must neither use nor destroy its copies of the objects.
#pragma once

#include <cstdint>
#include <functional>

namespace pccl {

// Opens a descriptor that forked children close. `open` makes one or a few system calls that never
// block, and returns the descriptor or -1. Preserves errno. Any thread.
int open_descriptor(const std::function<int()>& open);
// Closes a descriptor from open_descriptor(). Any thread.
void close_descriptor(int descriptor);

// The number of forks between the process that loaded the library and this one. An object made
// under another number is a copy. Any thread.
[[nodiscard]] std::uint64_t fork_generation();

}  // namespace pccl
