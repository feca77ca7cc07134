/* glibc 2.30 has pthread_cond_clockwait; libstdc++ waits by the steady clock with it. Where the system
 * has none, wait by the wall clock, as libstdc++ did before, at most for a second: the caller looks
 * at its own clock after each wait, so a step of the wall clock delays it by no more than that. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

typedef int Wait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);

enum { kSecond = 1000000000 };

static int wait_by_wall_clock(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                              const struct timespec* until) {
  struct timespec now, wall;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &wall);
  long long left = until->tv_sec - now.tv_sec > 1
                       ? kSecond
                       : (until->tv_sec - now.tv_sec) * (long long)kSecond + until->tv_nsec - now.tv_nsec;
  if (left < 0) left = 0;
  if (left > kSecond) left = kSecond;
  left += wall.tv_nsec;
  wall.tv_sec += left / kSecond;
  wall.tv_nsec = left % kSecond;
  return pthread_cond_timedwait(condition, mutex, &wall);
}

static Wait* chosen = wait_by_wall_clock;

static void choose(void) {
  Wait* const native = (Wait*)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
  if (native != NULL) chosen = native;
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, choose);
  return chosen(condition, mutex, clock, until);
}
