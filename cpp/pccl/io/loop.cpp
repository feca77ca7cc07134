#include "pccl/io/loop.h"

#include <pthread.h>

#include <algorithm>
#include <asio/post.hpp>
#include <chrono>
#include <csignal>
#include <exception>
#include <utility>

namespace pccl::io {
namespace {

using Clock = std::chrono::steady_clock;

// How long the background thread leaves the loop alone after a caller has let it go. Longer than a
// Python program takes between two small reductions, shorter than anybody notices.
constexpr Duration kLinger = std::chrono::milliseconds(1);
// While callers come and go faster than this, the background thread looks now and then whether it
// is needed, instead of being told each time: waking it costs the caller more than all the rest of
// release().
constexpr Duration kBusy = std::chrono::milliseconds(20);
// ... and looks only this often while they come that thick: each look takes a core from them.
constexpr Duration kDoze = std::chrono::milliseconds(8);
constexpr unsigned kThick = 16;  // visits between two looks
// Without anybody driving the loop for so long, timers and heartbeats come too late.
constexpr Duration kStarving = std::chrono::milliseconds(20);
constexpr int kStarvedHandlers = 64;  // then the callers have the turn again
constexpr int kStarvedSteps = 16;     // ... of the work between events
// Between two looks for events, which cost a system call each.
constexpr unsigned kSpinsPerPoll = 64;
constexpr unsigned kStepsPerPoll = 8;
constexpr int kHandlersPerPoll = 16;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

LoopDriver::LoopDriver() : work_(asio::make_work_guard(context_)) {}

LoopDriver::~LoopDriver() = default;

void LoopDriver::start() {
  // Signals are for the program's own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { background(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void LoopDriver::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    background_.notify_one();
    if (polling_ && !woken_) {
      woken_ = true;
      asio::post(context_, [] {});
    }
  }
  if (thread_.joinable()) thread_.join();
}

void LoopDriver::take(std::unique_lock<std::mutex>& lock) {
  if (held_) {
    ++wanted_;
    if (polling_ && !woken_) {
      woken_ = true;
      asio::post(context_, [] {});  // brings the driver out of its wait for events
    }
    turn_free_.wait(lock, [&] { return !held_; });
    --wanted_;
  }
  held_ = true;
}

void LoopDriver::give(std::unique_lock<std::mutex>&) {
  held_ = false;
  if (wanted_ > 0) {
    turn_free_.notify_one();
  } else if (sleepers_ > 0) {
    changed_.notify_one();  // one of them drives now
  } else if (parked_) {
    background_.notify_one();
  }
}

void LoopDriver::acquire() {
  std::unique_lock lock(mutex_);
  take(lock);
}

void LoopDriver::release() {
  const Instant now = Clock::now();
  std::unique_lock lock(mutex_);
  linger_until_ = now + kLinger;
  ++visits_;
  give(lock);
}

void LoopDriver::attend() {
  const std::lock_guard lock(mutex_);
  visits_ = 0;
  if (!dozing_) return;
  dozing_ = false;
  background_.notify_one();
}

void LoopDriver::notify() {
  const std::lock_guard lock(mutex_);
  if (sleepers_ > 0) changed_.notify_all();
}

// A handler that throws has met something nobody planned for, memory that ran out above all.
template <class Work>
void LoopDriver::drive(const Work& work) {
  try {
    work();
  } catch (const std::exception& error) {
    if (!failed_) throw;
    failed_(error.what());
  }
}

// One step of the work between events. Events are looked for every so many.
Pace LoopDriver::between() {
  if (!work_between_) return Pace::idle;
  Pace pace = Pace::idle;
  drive([&] { pace = work_between_(); });
  if (pace == Pace::idle) {
    rounds_ = 0;
    return pace;
  }
  const unsigned often = pace == Pace::spinning ? kSpinsPerPoll : kStepsPerPoll;
  if (++rounds_ >= often) {
    rounds_ = 0;
    drive([&] {
      for (int i = 0; i < kHandlersPerPoll && context_.poll_one() > 0; ++i) {
      }
    });
    const std::lock_guard lock(mutex_);
    polled_at_ = Clock::now();
  }
  if (pace == Pace::spinning) relax();
  if (pace == Pace::yielding) std::this_thread::yield();
  return pace;
}

bool LoopDriver::wait(const std::function<bool()>& done, Instant until) {
  for (;;) {
    if (done()) return true;
    if (Clock::now() >= until) return false;
    const Pace pace = between();
    if (pace != Pace::idle && wanted_.load(std::memory_order_relaxed) == 0) continue;
    if (done()) return true;
    {
      std::unique_lock lock(mutex_);
      if (wanted_ > 0) {
        ++sleepers_;
        give(lock);
        // Also while `held_` is momentarily false, those in take() come first.
        changed_.wait_until(lock, until, [&] { return done() || (!held_ && wanted_ == 0); });
        --sleepers_;
        take(lock);
        continue;
      }
      if (pace != Pace::idle) continue;
      polling_ = true;
    }
    drive([&] { context_.run_one_until(until); });
    const std::lock_guard lock(mutex_);
    polling_ = false;
    woken_ = false;
    polled_at_ = Clock::now();
  }
}

void LoopDriver::background() {
  std::unique_lock lock(mutex_);
  const auto free = [&] { return !held_ && wanted_ == 0 && sleepers_ == 0; };
  while (!stopping_) {
    const Instant now = Clock::now();
    // Callers that come and go without ever waiting must not keep the loop from its work.
    const bool starving = now - polled_at_ >= kStarving && !polling_ && sleepers_ == 0;
    const bool thick = std::exchange(visits_, 0) > kThick;
    const auto sleep_until = [&](Instant until) {
      dozing_ = thick;
      background_.wait_until(lock, thick ? std::max(until, now + kDoze) : until,
                             [&] { return stopping_ || dozing_ != thick; });
      dozing_ = false;
    };
    if (!starving && !free() && now < linger_until_ + kBusy) {
      sleep_until(now + kLinger);
      continue;
    }
    if (!starving && !free()) {
      parked_ = true;
      background_.wait(lock, [&] { return stopping_ || free(); });
      parked_ = false;
      continue;
    }
    if (!starving && now < linger_until_) {
      sleep_until(linger_until_);
      continue;
    }
    take(lock);
    if (!starving) {
      lock.unlock();
      const Pace pace = between();
      lock.lock();
      if (pace != Pace::idle || wanted_ > 0) {
        give(lock);
        continue;
      }
    }
    polling_ = true;
    lock.unlock();
    drive([&] {
      if (!starving) {
        context_.run_one();
        return;
      }
      for (int i = 0; i < kStarvedHandlers && context_.poll_one() > 0; ++i) {
      }
    });
    for (int i = 0; starving && i < kStarvedSteps && between() != Pace::idle; ++i) {
      if (wanted_.load(std::memory_order_relaxed) > 0) break;
    }
    lock.lock();
    polling_ = false;
    woken_ = false;
    polled_at_ = Clock::now();
    give(lock);
  }
}

}  // namespace pccl::io
