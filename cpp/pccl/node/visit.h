// One call of a user's thread inside the engine.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "pccl/base/clock.h"
#include "pccl/base/floats.h"
#include "pccl/node/communicator.h"

namespace pccl::node {

// Points to the calling thread's number, and expires when the thread ends.
[[nodiscard]] const std::shared_ptr<const std::uint64_t>& this_thread();

// A Limit, from the moment at which its call began. REQUIRES: the Limit outlives it.
struct Until {
  explicit Until(const Limit& of) : limit(of) {
    if (limit.timeout) deadline = clock_now() + *limit.timeout;
  }
  [[nodiscard]] bool passed() const { return deadline && clock_now() >= *deadline; }

  const Limit& limit;
  std::optional<Instant> deadline;
};

// A thread's stay inside the engine: holds the turn, and counts for the deadlock rule. The engine
// computes in the default floating-point environment, whichever thread has the turn.
class Visit {
 public:
  Visit(std::shared_ptr<Runtime> runtime, const Until& until);
  ~Visit();
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  [[nodiscard]] Runtime& runtime() { return *runtime_; }
  [[nodiscard]] peer::Engine& engine() { return runtime_->engine(); }
  [[nodiscard]] const Until& until() const { return until_; }
  [[nodiscard]] std::uint64_t thread() const { return thread_; }

  // Drives the loop until `done()`, for 100 ms or until `deadline`. Returns done().
  bool drive(const std::function<bool()>& done, const std::optional<Instant>& deadline = {});
  // Runs `work` without the turn, in the thread's own floating-point environment: other threads may
  // have the turn meanwhile.
  template <class Work>
  void outside(const Work& work) {
    runtime_->driver().release();
    floats_.leave();
    work();
    floats_.enter();
    runtime_->driver().acquire();
  }
  // Asks for Ctrl-C, without the turn.
  bool interrupted(const Limit& limit);

 private:
  DefaultFloats floats_;
  std::shared_ptr<Runtime> runtime_;  // outlives the turn
  const Until& until_;
  io::Turn turn_;
  std::uint64_t thread_;
};

}  // namespace pccl::node
