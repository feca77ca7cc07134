// An event loop that has no events, and the rule of its polling, for tests/test_loop.py.
#include "pccl/io/loop.h"

#include <nanobind/nanobind.h>

#include <asio/post.hpp>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "pccl/io/polling.h"

namespace nb = nanobind;

namespace {

// Its work between events blocks until let_go().
class HeldLoop {
 public:
  HeldLoop() {
    driver_.on_idle([this] {
      std::unique_lock lock(mutex_);
      // The first call follows a poll: the driver treats a loop that was never driven as starving.
      if (++calls_ == 1) return pccl::Pace::idle;
      held_ = true;
      changed_.notify_all();
      changed_.wait(lock, [this] { return let_go_; });
      return pccl::Pace::idle;
    });
    driver_.start();
  }
  ~HeldLoop() {
    let_go();
    wake();
    driver_.stop();
  }
  HeldLoop(const HeldLoop&) = delete;
  HeldLoop& operator=(const HeldLoop&) = delete;

  // Returns when the background thread is in its work.
  void wait_until_held() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return held_; });
  }
  void let_go() {
    const std::lock_guard lock(mutex_);
    let_go_ = true;
    changed_.notify_all();
  }
  void stop() { driver_.stop(); }
  // Posts an event, which ends a wait for events.
  void wake() {
    asio::post(driver_.context(), [] {});
  }

 private:
  pccl::io::LoopDriver driver_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int calls_ = 0;
  bool held_ = false;
  bool let_go_ = false;
};

// In microseconds.
class PollingRule {
 public:
  double length(double now) const {
    return std::chrono::duration<double, std::micro>(rule_.length(pccl::Instant(span(now))))
        .count();
  }
  void waited(double length) { rule_.waited(span(length)); }
  void yielded(double length, double now) { rule_.yielded(span(length), pccl::Instant(span(now))); }

 private:
  static pccl::Duration span(double microseconds) {
    return std::chrono::duration_cast<pccl::Duration>(
        std::chrono::duration<double, std::micro>(microseconds));
  }
  pccl::io::Polling rule_;
};

}  // namespace

void bind_loop(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<HeldLoop>(m, "HeldLoop")
      .def(nb::init<>())
      .def("wait_until_held", &HeldLoop::wait_until_held, Released())
      .def("let_go", &HeldLoop::let_go)
      .def("stop", &HeldLoop::stop, Released())
      .def("wake", &HeldLoop::wake);
  nb::class_<PollingRule>(m, "PollingRule")
      .def(nb::init<>())
      .def("length", &PollingRule::length, nb::arg("now"))
      .def("waited", &PollingRule::waited, nb::arg("length"))
      .def("yielded", &PollingRule::yielded, nb::arg("length"), nb::arg("now"));
}
