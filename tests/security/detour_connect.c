// For LD_PRELOAD: a connection to 127.0.0.2 goes to the same port of 127.0.0.1 instead.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
int connect(int descriptor, const struct sockaddr* to, socklen_t size) {
  int (*real)(int, const struct sockaddr*, socklen_t);
  *(void**)&real = dlsym(RTLD_NEXT, "connect");
  struct sockaddr_in other;
  if (to->sa_family != AF_INET || size < sizeof other) return real(descriptor, to, size);
  memcpy(&other, to, sizeof other);
  if (ntohl(other.sin_addr.s_addr) == 0x7f000002) other.sin_addr.s_addr = htonl(0x7f000001);
  return real(descriptor, (const struct sockaddr*)&other, sizeof other);
}
