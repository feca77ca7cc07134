// Touches memory that bytes come in to soon, on a thread of its own. The first touch of a page
// takes about as long as a copy to it, so the thread that receives would take twice as long.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "pccl/base/buffer.h"

namespace pccl::node {

// *any thread*
class Toucher {
 public:
  Toucher() = default;
  ~Toucher() { stop(); }
  Toucher(const Toucher&) = delete;
  Toucher& operator=(const Toucher&) = delete;

  // Blocks that have no other owner any more are left out, and small ones: the thread that receives
  // touches them as soon.
  void add(std::vector<BufferPtr> memory);
  // Lets go of all memory. Nothing is touched afterwards.
  void stop();

 private:
  void work();
  [[nodiscard]] BufferPtr next();

  std::mutex mutex_;
  // Under the lock:
  std::deque<BufferPtr> memory_;
  std::thread thread_;                 // ends when no memory is left
  bool working_ = false;               // the thread will look at memory_ again
  std::atomic<bool> stopped_ = false;  // read without it, too
};

}  // namespace pccl::node
