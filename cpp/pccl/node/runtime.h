// Sockets, timers and a loop around one engine: brings it events and carries out its actions.
#pragma once

#include <asio/steady_timer.hpp>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "pccl/io/congestion.h"
#include "pccl/io/loop.h"
#include "pccl/io/workers.h"
#include "pccl/node/master_connection.h"
#include "pccl/node/options.h"
#include "pccl/node/peer_connections.h"
#include "pccl/node/toucher.h"
#include "pccl/node/trace_writer.h"

namespace pccl::node {

// A forked copy must be neither used nor destroyed (base/fork.h).
class Runtime {
 public:
  // Listens, and starts the loop and the engine, which dials the master.
  [[nodiscard]] static Result<std::shared_ptr<Runtime>> open(RuntimeOptions options);
  ~Runtime();  // REQUIRES: shut() has returned

  // -- any thread
  [[nodiscard]] io::LoopDriver& driver() { return driver_; }
  [[nodiscard]] peer::Standing standing() const {
    return standing_.load(std::memory_order_acquire);
  }
  [[nodiscard]] std::size_t unfinished() const {
    return unfinished_.load(std::memory_order_acquire);
  }
  [[nodiscard]] std::uint32_t join_failures() const {
    return join_failures_.load(std::memory_order_acquire);
  }
  [[nodiscard]] bool draining() const { return draining_.load(std::memory_order_acquire); }
  [[nodiscard]] bool between_masters() const {
    return between_masters_.load(std::memory_order_acquire);
  }
  // The newest epoch that the engine knows; null before the admission.
  [[nodiscard]] peer::Record newest() const {
    const std::lock_guard lock(newest_mutex_);
    return newest_;
  }
  // A thread that has used the engine has ended. Does not block.
  static void thread_ended(const std::shared_ptr<Runtime>& runtime, std::uint64_t thread);
  // Ends the background thread and closes all connections. REQUIRES: not with the turn.
  void shut();

  // -- REQUIRES: the turn
  [[nodiscard]] peer::Engine& engine() { return engine_; }
  [[nodiscard]] const std::string& dial_failure() const { return master_.dial_failure(); }
  // Carries out the engine's actions. Call after every use of the engine.
  void act();
  // The newest epoch's number; 0: there is none.
  [[nodiscard]] std::uint64_t epoch() const {
    const peer::Record& record = engine_.session().record();
    return record == nullptr ? 0 : record->epoch;
  }
  // All messages to the master are written.
  [[nodiscard]] bool control_flushed() const { return control_flushed_.load(); }

 private:
  Runtime(RuntimeOptions options, std::shared_ptr<io::TlsContext> tls, io::Congestion congestion,
          std::unique_ptr<TraceWriter> trace);
  [[nodiscard]] peer::EngineOptions engine_options(bool paced);
  void arm_timer(Duration least);
  [[nodiscard]] Pace step();

  RuntimeOptions options_;
  std::unique_ptr<TraceWriter> trace_;  // null: none is asked for
  const unsigned cores_;  // that this process might use at first; threads may have fewer later
  io::Workers workers_;
  Toucher toucher_;
  io::LoopDriver driver_;
  peer::Engine engine_;
  MasterConnection master_;
  PeerConnections peers_;
  asio::steady_timer timer_;
  Instant armed_ = Instant::max();
  bool shut_ = false;

  std::atomic<peer::Standing> standing_{peer::Standing::joining};
  std::atomic<std::size_t> unfinished_{0};
  std::atomic<bool> draining_{false};
  std::atomic<bool> between_masters_{false};
  std::atomic<std::uint32_t> join_failures_{0};
  std::atomic<bool> control_flushed_{true};
  mutable std::mutex newest_mutex_;  // held for a copy, by writers that hold the loop
  peer::Record newest_;
};

}  // namespace pccl::node
