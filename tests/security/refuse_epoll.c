// For LD_PRELOAD: while the file TEST_REFUSE exists, epoll watches no further descriptor.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>
int epoll_ctl(int epoll, int what, int descriptor, struct epoll_event* event) {
  int (*real)(int, int, int, struct epoll_event*);
  *(void**)&real = dlsym(RTLD_NEXT, "epoll_ctl");
  const char* file = getenv("TEST_REFUSE");
  if (what == EPOLL_CTL_ADD && file != NULL && access(file, F_OK) == 0) {
    errno = ENOSPC;
    return -1;
  }
  return real(epoll, what, descriptor, event);
}
