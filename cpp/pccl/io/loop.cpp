#include "pccl/io/loop.h"

#include <algorithm>
#include <asio/post.hpp>
#include <chrono>
#include <exception>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/base/relax.h"
#include "pccl/io/thread.h"

namespace pccl::io {
namespace {

// How long the loop stays undriven after a caller has released it. Longer than a Python program
// takes between two small reductions, and too short to matter otherwise.
constexpr Duration kLinger = std::chrono::milliseconds(1);
// While callers come and go faster than this, the background thread polls whether it is needed.
// Waking it in every release() would cost the caller more than the rest of release().
constexpr Duration kBusy = std::chrono::milliseconds(20);
// ... and polls only this often after kThick visits since the last poll: a poll takes a core from
// the callers.
constexpr Duration kDoze = std::chrono::milliseconds(8);
constexpr unsigned kThick = 16;
// If no thread drives the loop for so long, timers and heartbeats are late.
constexpr Duration kStarving = std::chrono::milliseconds(20);
constexpr int kStarvedHandlers = 64;  // then the callers have the turn again
constexpr int kStarvedSteps = 16;     // ... of the work between events
// Between two polls for events, which cost a system call each.
constexpr unsigned kSpinsPerPoll = 64;
constexpr unsigned kStepsPerPoll = 8;
constexpr int kHandlersPerPoll = 16;

}  // namespace

LoopDriver::LoopDriver() : work_(asio::make_work_guard(context_)) {}

LoopDriver::~LoopDriver() = default;

void LoopDriver::start() {
  thread_ = start_thread([this] { background(); });
}

void LoopDriver::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    background_.notify_one();
    wake_driver();
  }
  if (thread_.joinable()) thread_.join();
}

void LoopDriver::wake_driver() {
  if (in_loop_ && !std::exchange(woken_, true)) asio::post(context_, [] {});
}

void LoopDriver::take(std::unique_lock<std::mutex>& lock) {
  if (held_) {
    ++wanted_;
    wake_driver();
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
  const Instant now = clock_now();
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

// A handler throws only when something unexpected happens, mostly when memory runs out.
template <class Work>
void LoopDriver::drive(const Work& work) {
  try {
    work();
  } catch (const std::exception& error) {
    if (!failed_) throw;
    failed_(error.what());
  }
}

// One step of the work between events. Polls for events every few steps.
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
    polled_at_ = clock_now();
  }
  if (pace == Pace::spinning) relax();
  if (pace == Pace::yielding) std::this_thread::yield();
  return pace;
}

// Runs the next event's handler, or returns at `until`.
void LoopDriver::run_next(Instant until) {
  const Instant begin = clock_now();
  const Instant sleep_at = std::min(until, begin + polling_.length(begin));
  for (Instant now = begin; now < sleep_at;) {
    if (context_.poll_one() > 0) return;
    std::this_thread::yield();
    const Instant after = clock_now();
    polling_.yielded(after - now, after);
    now = after;
  }
  context_.run_one_until(until);
  polling_.waited(clock_now() - begin);
}

bool LoopDriver::wait(const std::function<bool()>& done, Instant until) {
  for (;;) {
    if (done()) return true;
    if (clock_now() >= until) return false;
    const Pace pace = between();
    if (pace != Pace::idle && wanted_.load(std::memory_order_relaxed) == 0) continue;
    if (done()) return true;
    {
      std::unique_lock lock(mutex_);
      if (wanted_ > 0) {
        ++sleepers_;
        give(lock);
        // Threads in take() come first, even while `held_` is false for a moment.
        changed_.wait_until(lock, until, [&] { return done() || (!held_ && wanted_ == 0); });
        --sleepers_;
        take(lock);
        continue;
      }
      if (pace != Pace::idle) continue;
      in_loop_ = true;
    }
    drive([&] { run_next(until); });
    const std::lock_guard lock(mutex_);
    in_loop_ = false;
    woken_ = false;
    polled_at_ = clock_now();
  }
}

void LoopDriver::background() {
  std::unique_lock lock(mutex_);
  const auto free = [&] { return !held_ && wanted_ == 0 && sleepers_ == 0; };
  while (!stopping_) {
    const Instant now = clock_now();
    // Callers that come and go without waiting must not starve the loop.
    const bool starving = now - polled_at_ >= kStarving && !in_loop_ && sleepers_ == 0;
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
      // stop() wakes only a thread that polls.
      if (pace != Pace::idle || wanted_ > 0 || stopping_) {
        give(lock);
        continue;
      }
    }
    in_loop_ = true;
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
    in_loop_ = false;
    woken_ = false;
    polled_at_ = clock_now();
    give(lock);
  }
}

}  // namespace pccl::io
