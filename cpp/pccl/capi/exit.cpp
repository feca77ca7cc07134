#include "pccl/capi/exit.h"

#include <cstdlib>
#include <mutex>
#include <set>

#include "pccl/capi/call.h"

namespace pccl::capi {
namespace {

// Never destroyed: threads may still use it while the process ends.
struct Open {
  std::mutex mutex;
  std::set<ClosedAtExit*> all;
};

void close_all() noexcept;

Open& open() {
  static Open& made = *[] {
    (void)std::atexit([] { close_all(); });
    return new Open;
  }();
  return made;
}

void close_all() noexcept {
  // A signal handler has interrupted a call of the library, and called exit().
  // Closing would wait for that call.
  if (Inside::here()) return;
  const Inside inside;
  try {
    // Held by another thread: one that closes a handle, or one that a fork did
    // not copy.
    const std::unique_lock lock(open().mutex, std::try_to_lock);
    if (!lock) return;
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
