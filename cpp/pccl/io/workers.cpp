#include "pccl/io/workers.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/base/relax.h"
#include "pccl/io/thread.h"

namespace pccl::io {
namespace {

// How long a helper waits for the next run before it sleeps. Waking it takes a few times as long; a
// longer wait saved no more time, and cost more CPU.
constexpr Duration kSpin = std::chrono::microseconds(20);
constexpr unsigned kSpinsPerLook = 32;
constexpr std::uint64_t kParts = 0xffffffff;  // the lower half of `open_`
constexpr unsigned kRunShift = 32;

}  // namespace

void Workers::resize(unsigned threads) {
  if (threads == threads_) return;
  stop();
  threads_ = threads;
}

void Workers::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
  }
  for (std::thread& helper : helpers_) helper.join();
  helpers_.clear();
}

void Workers::start() {
  if (helpers_.size() + 1 >= threads_) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = false;
  }
  try {
    while (helpers_.size() + 1 < threads_) helpers_.push_back(start_thread([this] { serve(); }));
  } catch (const std::system_error&) {
    threads_ = static_cast<unsigned>(helpers_.size()) + 1;  // the system allows no more
  }
}

void Workers::run(std::size_t count, const std::function<void(std::size_t)>& work) {
  if (count < 2 || threads_ < 2) {
    for (std::size_t i = 0; i < count; ++i) work(i);
    return;
  }
  start();
  work_.store(&work, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  const std::uint64_t number = (open_.load(std::memory_order_relaxed) >> kRunShift) + 1;
  open_.store(number << kRunShift | count);
  if (const unsigned asleep = asleep_.load(); asleep > 0) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 1; i < count && i <= asleep; ++i) wake_.notify_one();
  }
  help();
  for (unsigned spins = 1; done_.load(std::memory_order_acquire) < count; ++spins) {
    relax();
    // The other thread may need this core to finish.
    if (spins % kSpinsPerLook == 0) std::this_thread::yield();
  }
  std::exception_ptr failure;
  {
    const std::lock_guard lock(mutex_);
    failure = std::exchange(failure_, nullptr);
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

void Workers::help() {
  std::uint64_t open = open_.load();
  while ((open & kParts) > 0) {
    if (!open_.compare_exchange_weak(open, open - 1)) continue;
    // The run is not over while this part is not done: `work_` is that of the part.
    const auto* work = work_.load(std::memory_order_relaxed);
    try {
      (*work)((open & kParts) - 1);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (failure_ == nullptr) failure_ = std::current_exception();
    }
    done_.fetch_add(1, std::memory_order_release);
    open = open_.load();
  }
}

void Workers::serve() {
  Instant worked = clock_now();
  std::uint64_t seen = 0;
  for (;;) {
    for (unsigned spins = 0; spins < kSpinsPerLook && open_.load() == seen; ++spins) relax();
    if (const std::uint64_t open = open_.load(); open != seen) {
      help();
      seen = open_.load() & ~kParts;
      worked = clock_now();
      continue;
    }
    if (clock_now() - worked < kSpin) continue;
    {
      std::unique_lock lock(mutex_);
      ++asleep_;
      wake_.wait(lock, [&] { return stopping_ || open_.load() != seen; });
      --asleep_;
      if (stopping_) return;
    }
  }
}

}  // namespace pccl::io
