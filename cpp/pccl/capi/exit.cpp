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
  // exit() was called by a signal handler that has interrupted a call of ours: closing would wait
  // for that call.
  if (Inside::here()) return;
  const Inside inside;
  try {
    // Taken only if a thread that was copied by a fork had it, or somebody closes one by hand.
    const std::unique_lock lock(open().mutex, std::try_to_lock);
    if (!lock) return;
    for (ClosedAtExit* one : open().all) one->close();
  } catch (...) {
    // The process ends anyway; the others notice.
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
