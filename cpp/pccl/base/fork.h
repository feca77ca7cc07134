// What a fork leaves behind: the child has a copy of every descriptor and of every engine object,
// but none of the engine's threads. Its descriptors are closed at once, without a shutdown that the
// parent's connections would feel, and its objects must be neither used nor destroyed.
#pragma once

#include <cstdint>
#include <functional>

namespace pccl {

// Opens a descriptor that forked children do not keep. `open` makes one system call, or a few that
// never block, and returns what it opened or -1; errno is kept. Any thread.
int open_descriptor(const std::function<int()>& open);
// Closes what open_descriptor returned. Any thread.
void close_descriptor(int descriptor);

// How often this process's line was forked since the library was loaded: an object that was made
// under another number is a copy. Any thread.
[[nodiscard]] std::uint64_t fork_generation();

}  // namespace pccl
