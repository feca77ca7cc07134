// Decides which thread drives an event loop. Only the thread that has the *turn* may touch the
// loop's objects. A background thread has the turn when no other thread wants it. A calling thread
// takes it over, works on the objects directly, and drives the loop while it waits, so that its
// wait costs no hand-off between threads.
#pragma once

#include <asio/executor_work_guard.hpp>
#include <asio/io_context.hpp>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "pccl/base/ids.h"
#include "pccl/base/pace.h"
#include "pccl/io/polling.h"

namespace pccl::io {

// *any thread*, as said for each call. No method calls back under a lock, except `done` of wait().
class LoopDriver {
 public:
  LoopDriver();
  ~LoopDriver();  // REQUIRES: stop() has returned, or start() was never called; nobody has the turn
  LoopDriver(const LoopDriver&) = delete;
  LoopDriver& operator=(const LoopDriver&) = delete;

  // The thread with the turn runs the handlers. Any thread may post.
  [[nodiscard]] asio::io_context& context() { return context_; }

  // `failed` is called with the turn when a handler throws. Call before start().
  void on_failure(std::function<void(const char*)> failed) { failed_ = std::move(failed); }

  // `work` is called with the turn before the loop waits for events: work that makes no events.
  // While it is not idle, the loop only polls for events now and then. Call before start().
  void on_idle(std::function<Pace()> work) { work_between_ = std::move(work); }

  // Starts and ends the background thread. Waiting callers continue to drive after stop(). Call
  // start() once. Call stop() from one thread, without the turn, and not from a handler; a second
  // call does nothing.
  void start();
  void stop();

  // Blocks until the calling thread has the turn, which its driver gives up at once. Not recursive.
  void acquire();
  // Gives the turn back. The background thread takes it a moment later, so that a caller that
  // returns soon finds it free.
  void release();
  // There is work that no caller waits for: the background thread must not sleep through it while
  // callers come and go. REQUIRES: the turn.
  void attend();

  // Drives the loop, or sleeps while another caller drives it, until `done()` or `until`. Returns
  // done(). REQUIRES: the turn, which the caller also has afterwards; others may have it meanwhile.
  // `done` is quick and reads only what any thread may read: it is also called under the driver's
  // lock.
  bool wait(const std::function<bool()>& done, Instant until);
  // Sleeping callers check their `done` again. REQUIRES: the turn.
  void notify();

 private:
  void take(std::unique_lock<std::mutex>& lock);
  void give(std::unique_lock<std::mutex>& lock);
  void wake_driver();  // out of its wait for events. REQUIRES: the lock
  template <class Work>
  void drive(const Work& work);
  void background();
  [[nodiscard]] Pace between();
  void run_next(Instant until);

  asio::io_context context_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  std::thread thread_;

  std::mutex mutex_;
  std::condition_variable turn_free_;   // threads in take()
  std::condition_variable changed_;     // callers that sleep in wait()
  std::condition_variable background_;  // the background thread
  bool held_ = false;                   // a thread has the turn
  bool in_loop_ = false;                // the thread with the turn is inside the loop
  bool woken_ = false;                  // the thread inside the loop was woken to leave it
  bool parked_ = false;                 // the background thread sleeps until it is woken
  bool dozing_ = false;  // the background thread sleeps longer, since callers come and go
  bool stopping_ = false;
  unsigned visits_ = 0;              // since the background thread last looked
  std::atomic<unsigned> wanted_{0};  // threads in take(); changed under the lock
  unsigned sleepers_ = 0;            // callers in wait() that do not drive
  Instant linger_until_{};
  Instant polled_at_{};  // when the loop was last driven
  std::function<void(const char*)> failed_;
  std::function<Pace()> work_between_;
  unsigned rounds_ = 0;  // of work since the last poll for events
  Polling polling_;      // of callers
};

// The turn, for a scope.
class Turn {
 public:
  explicit Turn(LoopDriver& driver) : driver_(driver) { driver_.acquire(); }
  ~Turn() { driver_.release(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  LoopDriver& driver_;
};

}  // namespace pccl::io
