// Channels serve shared memory alone, which these systems do not have here: see shared_memory.cpp.
// Sockets with names of files would be left behind by a killed process.
#include "pccl/os/channel.h"

#include <cerrno>

namespace pccl::os {
namespace {

int no_channel() {
  errno = ENOTSUP;
  return -1;
}

}  // namespace

int open_channel() { return no_channel(); }

int listen_channel(int, std::string_view, int) { return no_channel(); }

int connect_channel(int, std::string_view) { return no_channel(); }

bool same_user(int) { return false; }

ssize_t send_packet(int, std::span<const std::uint8_t>, int) { return no_channel(); }

ReceivedPacket receive_packet(int, std::span<std::uint8_t>) { return {no_channel(), -1}; }

}  // namespace pccl::os
