// Threads that do parts of the engine's work on memory and sockets, while the thread with the turn
// waits for them. So the state machines stay single-threaded: nothing else runs meanwhile.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "pccl/base/parallel.h"

namespace pccl::io {

// *one thread at a time: whoever drives the loop*
class Workers final : public Parallel {
 public:
  // `threads`: that work on a run, with the one that calls it. The others start at the first run.
  explicit Workers(unsigned threads) : threads_(threads) {}
  ~Workers() override { stop(); }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  [[nodiscard]] unsigned threads() const { return threads_; }
  void resize(unsigned threads);
  void run(std::size_t count, const std::function<void(std::size_t)>& work) override;

 private:
  void start();
  void stop();
  void serve();
  // Does parts of the present run until none is left.
  void help();

  unsigned threads_;
  std::vector<std::thread> helpers_;

  // The number of the run and, in the lower half, how many of its parts nobody has taken yet. One
  // word, so that no thread can take a part of a run that is over.
  std::atomic<std::uint64_t> open_{0};
  std::atomic<const std::function<void(std::size_t)>*> work_{nullptr};
  std::atomic<std::size_t> done_{0};
  std::atomic<unsigned> asleep_{0};  // changed under the lock
  std::mutex mutex_;
  std::condition_variable wake_;
  std::exception_ptr failure_;  // the first of this run; under the lock
  bool stopping_ = false;       // under the lock
};

}  // namespace pccl::io
