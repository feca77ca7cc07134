// Connections between processes of one host that carry packets, and a descriptor with each. They
// are found by a name that ends with the process, so a killed one leaves nothing behind. Where
// shares_memory() is false all functions fail with ENOTSUP. All functions: *any thread*.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <string_view>

namespace pccl::os {

// A new socket: non-blocking and closed by exec. -1: errno. accept_stream() accepts at it.
[[nodiscard]] int open_channel();
// Listens under the name. -1: errno.
[[nodiscard]] int listen_channel(int descriptor, std::string_view name, int backlog);
// Connects to the process that listens under the name. -1: errno.
[[nodiscard]] int connect_channel(int descriptor, std::string_view name);

// Whether the process that called listen or connect at the other end runs as the same user.
[[nodiscard]] bool same_user(int descriptor);

// Sends one packet, and `passed` with it unless that is -1. Does not block. -1: errno.
[[nodiscard]] ssize_t send_packet(int descriptor, std::span<const std::uint8_t> bytes, int passed);

struct ReceivedPacket {
  ssize_t bytes = 0;  // 0: the other end closed the connection; -1: errno
  int passed = -1;    // the first descriptor that came with it, closed by exec; others are closed
};
// Reads one packet, cut to the size of `into`. Does not block.
[[nodiscard]] ReceivedPacket receive_packet(int descriptor, std::span<std::uint8_t> into);

}  // namespace pccl::os
