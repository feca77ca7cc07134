// TCP sockets that are non-blocking and closed by exec, and raise no signal when a write finds the
// connection broken. All functions: *any thread*.
#pragma once

namespace pccl::os {

// A new socket of that address family. -1: errno.
[[nodiscard]] int open_stream(int family);
// The next connection of a listening socket, of TCP or of channel.h. -1: errno.
[[nodiscard]] int accept_stream(int listener);

// Sends a probe after `idle` seconds of silence, and every `interval` seconds after it; the
// connection ends when `probes` have no answer. Where a number cannot be set, the system's holds.
void keep_alive(int descriptor, int idle, int interval, int probes);

}  // namespace pccl::os
