// Work in parts that may run at the same time. Pure rooms say what may; the shell has the threads.
#pragma once

#include <cstddef>
#include <functional>

namespace pccl {

// Fewer bytes than this are not worth it: other threads would take longer to wake up.
inline constexpr std::size_t kWorthSharing = 64 << 10;

// *one thread: the engine's*
class Parallel {
 public:
  virtual ~Parallel() = default;
  // Calls work(0) to work(count - 1), each once, in any order and on any thread. Returns when all
  // of them have returned. Throws what one of them has thrown.
  virtual void run(std::size_t count, const std::function<void(std::size_t)>& work) = 0;
};

// One part after the other, on the calling thread.
class Serial final : public Parallel {
 public:
  void run(std::size_t count, const std::function<void(std::size_t)>& work) override {
    for (std::size_t i = 0; i < count; ++i) work(i);
  }
};

}  // namespace pccl
