/* Preloaded into a peer: name servers that answer late, an event loop that has no room, a system
 * that promises no more memory than it has, and an OpenSSL without ChaCha20. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

/* Names that end in ".late" are this host's. TEST_ANSWER_MS: how long each look-up takes. */
int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints,
                struct addrinfo **found) {
  int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
  *(void **)&real = dlsym(RTLD_NEXT, "getaddrinfo");
  const char *end = name == NULL ? NULL : strstr(name, ".late");
  if (end == NULL) return real(name, service, hints, found);
  const long ms = atol(getenv("TEST_ANSWER_MS"));
  const struct timespec time = {ms / 1000, ms % 1000 * 1000000};
  nanosleep(&time, NULL);
  return real("127.0.0.1", service, hints, found);
}

static int option(int descriptor, int which) {
  int value = 0;
  socklen_t size = sizeof value;
  return getsockopt(descriptor, SOL_SOCKET, which, &value, &size) == 0 ? value : -1;
}

/* TEST_REFUSE, for example "inet13": the first and the third connection over a network are not
 * taken; "unix1": the first one on this host. */
int epoll_ctl(int loop, int what, int descriptor, struct epoll_event *event) {
  static unsigned seen;
  int (*real)(int, int, int, struct epoll_event *);
  *(void **)&real = dlsym(RTLD_NEXT, "epoll_ctl");
  const char *refuse = getenv("TEST_REFUSE");
  const int family = option(descriptor, SO_DOMAIN);
  if (refuse != NULL && what == EPOLL_CTL_ADD && option(descriptor, SO_ACCEPTCONN) == 0 &&
      family == (strncmp(refuse, "inet", 4) == 0 ? AF_INET : AF_UNIX)) {
    const char number = (char)('1' + __atomic_fetch_add(&seen, 1, __ATOMIC_RELAXED));
    if (number <= '9' && strchr(refuse + 4, number) != NULL) {
      errno = ENOSPC;
      return -1;
    }
  }
  return real(loop, what, descriptor, event);
}

/* TEST_COUNTED, a file that has "2": the system counts all memory. */
int open(const char *path, int flags, ...) {
  int (*real)(const char *, int, ...);
  *(void **)&real = dlsym(RTLD_NEXT, "open");
  const char *counted = getenv("TEST_COUNTED");
  if (counted != NULL && strcmp(path, "/proc/sys/vm/overcommit_memory") == 0) path = counted;
  va_list more;
  va_start(more, flags);
  const mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;
  va_end(more);
  return real(path, flags, mode);
}

/* TEST_FULL: there is no memory left for files. TEST_SIGNALS: a signal ends the first call for each
 * file, and every call for more than 16 MiB. */
int posix_fallocate(int descriptor, off_t at, off_t size) {
  static int interrupted = -1;
  int (*real)(int, off_t, off_t);
  *(void **)&real = dlsym(RTLD_NEXT, "posix_fallocate");
  if (getenv("TEST_FULL") != NULL) return ENOSPC;
  const int first = __atomic_exchange_n(&interrupted, descriptor, __ATOMIC_RELAXED) != descriptor;
  if (getenv("TEST_SIGNALS") != NULL && (first || size > 16 << 20)) return EINTR;
  return real(descriptor, at, size);
}

/* TEST_NO_CHACHA: an OpenSSL 1.1.1 that was built without ChaCha20. OpenSSL itself calls this with
 * its list of all suites. RTLD_NEXT does not search the library: it is a module's. */
int SSL_CTX_set_ciphersuites(void *context, const char *suites) {
  if (getenv("TEST_NO_CHACHA") != NULL && strstr(suites, "CHACHA20") != NULL &&
      strstr(suites, "AES_256") == NULL)
    return 0;
  void *library = dlopen("libssl.so.3", RTLD_LAZY | RTLD_NOLOAD);
  if (library == NULL) library = dlopen("libssl.so.1.1", RTLD_LAZY | RTLD_NOLOAD);
  int (*real)(void *, const char *);
  *(void **)&real = dlsym(library, "SSL_CTX_set_ciphersuites");
  return real(context, suites);
}
