#include "pccl/os/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

namespace pccl::os {
namespace {

void set_option(int descriptor, int level, int option, int value) {
  (void)::setsockopt(descriptor, level, option, &value, sizeof value);
}

}  // namespace

// Each write asks for no signal by MSG_NOSIGNAL.
int open_stream(int family) {
  return ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);
}

int accept_stream(int listener) {
  return ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
}

void keep_alive(int descriptor, int idle, int interval, int probes) {
  set_option(descriptor, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, idle);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, interval);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPCNT, probes);
}

}  // namespace pccl::os
