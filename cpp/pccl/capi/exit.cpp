#include "pccl/capi/exit.h"

#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>

#include "pccl/base/clock.h"
#include "pccl/base/fork.h"
#include "pccl/capi/call.h"

namespace pccl::capi {
namespace {

constexpr Duration kPatience = std::chrono::seconds(1);
constexpr Duration kPause = std::chrono::milliseconds(1);

// Never destroyed: threads may still use it while the process ends.
struct Open {
  std::mutex mutex;
  std::set<ClosedAtExit*> all;
};

void close_all() noexcept;

Open& open() {
  static Open& made = *[] {
    // Registers the fork handlers of base/fork.h first: those that run before a
    // fork run in reverse order, and closing takes that lock under this one.
    (void)fork_generation();
    auto* const one = new Open;
    pthread_atfork([] { open().mutex.lock(); }, [] { open().mutex.unlock(); },
                   [] {
                     open().all.clear();  // copies, which are never closed
                     open().mutex.unlock();
                   });
    (void)std::atexit([] { close_all(); });
    return one;
  }();
  return made;
}

void close_all() noexcept {
  // A signal handler has interrupted a call of the library, and called exit().
  // Closing would wait for that call.
  if (Inside::here()) return;
  const Inside inside;
  try {
    // Others hold it for an instant, unless one of them has called exit(), too.
    std::unique_lock lock(open().mutex, std::try_to_lock);
    for (const Instant begin = clock_now(); !lock.owns_lock() && !lock.try_lock();) {
      if (clock_now() - begin > kPatience) return;
      std::this_thread::sleep_for(kPause);
    }
    for (ClosedAtExit* one : open().all) one->close();
  } catch (...) {
    // The process ends anyway, and the other peers notice.
  }
}

}  // namespace

void ClosedAtExit::opened() {
  const std::lock_guard lock(open().mutex);
  open().all.insert(this);
}

void ClosedAtExit::gone() {
  const std::lock_guard lock(open().mutex);
  open().all.erase(this);
}

}  // namespace pccl::capi
