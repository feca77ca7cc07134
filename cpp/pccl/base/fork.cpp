#include "pccl/base/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace pccl {
namespace {

// Never destroyed: threads may still close descriptors while the process ends.
struct Descriptors {
  std::mutex mutex;  // held only around system calls that do not block
  std::vector<int> open;
  std::atomic<std::uint64_t> generation{0};
};

Descriptors& descriptors() {
  static Descriptors& all = *[] {
    auto* made = new Descriptors;
    pthread_atfork([] { descriptors().mutex.lock(); }, [] { descriptors().mutex.unlock(); },
                   [] {
                     Descriptors& copy = descriptors();
                     for (const int descriptor : copy.open) ::close(descriptor);
                     copy.open.clear();
                     copy.generation.fetch_add(1, std::memory_order_relaxed);
                     copy.mutex.unlock();
                   });
    return made;
  }();
  return all;
}

}  // namespace

int open_descriptor(const std::function<int()>& open) {
  Descriptors& all = descriptors();
  const std::lock_guard lock(all.mutex);
  // Reserve first: nothing may throw once the descriptor is open.
  if (all.open.size() == all.open.capacity()) all.open.reserve(2 * all.open.size() + 16);
  const int descriptor = open();
  if (descriptor >= 0) all.open.push_back(descriptor);
  return descriptor;
}

void close_descriptor(int descriptor) {
  Descriptors& all = descriptors();
  const std::lock_guard lock(all.mutex);
  const auto found = std::find(all.open.begin(), all.open.end(), descriptor);
  if (found == all.open.end()) return;
  *found = all.open.back();
  all.open.pop_back();
  ::close(descriptor);
}

std::uint64_t fork_generation() { return descriptors().generation.load(std::memory_order_relaxed); }

}  // namespace pccl
