#include "pccl/os/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace pccl::os {
namespace {

void set_option(int descriptor, int level, int option, int value) {
  (void)::setsockopt(descriptor, level, option, &value, sizeof value);
}

// In steps: a program started by another thread between them inherits the descriptor.
int prepared(int descriptor) {
  if (descriptor < 0) return -1;
#if defined(SO_NOSIGPIPE)
  set_option(descriptor, SOL_SOCKET, SO_NOSIGPIPE, 1);
#endif
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (flags >= 0 && ::fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) == 0 &&
      ::fcntl(descriptor, F_SETFD, FD_CLOEXEC) == 0)
    return descriptor;
  const int error = errno;
  ::close(descriptor);
  errno = error;
  return -1;
}

}  // namespace

int open_stream(int family) { return prepared(::socket(family, SOCK_STREAM, IPPROTO_TCP)); }

int accept_stream(int listener) { return prepared(::accept(listener, nullptr, nullptr)); }

void keep_alive(int descriptor, int idle, int interval, int probes) {
  set_option(descriptor, SOL_SOCKET, SO_KEEPALIVE, 1);
#if defined(TCP_KEEPIDLE)
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, idle);
#elif defined(TCP_KEEPALIVE)
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPALIVE, idle);
#endif
#if defined(TCP_KEEPINTVL)
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, interval);
#endif
#if defined(TCP_KEEPCNT)
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPCNT, probes);
#endif
}

}  // namespace pccl::os
