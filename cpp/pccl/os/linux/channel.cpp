#include "pccl/os/channel.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

namespace pccl::os {
namespace {

// An abstract name: it ends at the borders of a network namespace.
std::pair<sockaddr_un, socklen_t> address_of(std::string_view name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t size = std::min(name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), size);  // a leading zero: abstract
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size)};
}

// Returns the first descriptor that came with `message`, or -1, and closes the others.
int first_descriptor(msghdr& message) {
  int first = -1;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t k = 0; k < count; ++k) {
      int one = -1;
      std::memcpy(&one, CMSG_DATA(header) + k * sizeof(int), sizeof one);
      if (first < 0) {
        first = one;
      } else {
        ::close(one);
      }
    }
  }
  return first;
}

}  // namespace

int open_channel() { return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }

int listen_channel(int descriptor, std::string_view name, int backlog) {
  const auto [address, size] = address_of(name);
  if (::bind(descriptor, reinterpret_cast<const sockaddr*>(&address), size) != 0) return -1;
  return ::listen(descriptor, backlog);
}

int connect_channel(int descriptor, std::string_view name) {
  const auto [address, size] = address_of(name);
  return ::connect(descriptor, reinterpret_cast<const sockaddr*>(&address), size);
}

bool same_user(int descriptor) {
  ucred other{};
  socklen_t size = sizeof other;
  return ::getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 &&
         other.uid == ::geteuid();
}

ssize_t send_packet(int descriptor, std::span<const std::uint8_t> bytes, int passed) {
  iovec part{const_cast<std::uint8_t*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (passed >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &passed, sizeof passed);
  }
  return ::sendmsg(descriptor, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

ReceivedPacket receive_packet(int descriptor, std::span<std::uint8_t> into) {
  iovec part{into.data(), into.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(4 * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(descriptor, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0) return {got, -1};
  return {got, first_descriptor(message)};  // even an empty packet may carry some
}

}  // namespace pccl::os
