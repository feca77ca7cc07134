// Sockets, timers and a loop around one engine: brings it events and carries out its actions.
#pragma once

#include <asio/steady_timer.hpp>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "pccl/base/allowance.h"
#include "pccl/io/anteroom.h"
#include "pccl/io/connector.h"
#include "pccl/io/handshake.h"
#include "pccl/io/introduction.h"
#include "pccl/io/loop.h"
#include "pccl/io/secret.h"
#include "pccl/io/socket.h"
#include "pccl/io/tls.h"
#include "pccl/memory/pipe.h"
#include "pccl/node/neighbours.h"
#include "pccl/peer/engine.h"

namespace pccl::node {

struct RuntimeOptions {
  wire::Address master;
  peer::JoinOptions join;  // its addresses are filled in by open()
  Settings settings;
  std::uint16_t port = 0;                // where other peers connect; 0: any free one
  std::vector<wire::Address> advertise;  // port 0: the port above
  io::Secret secret;                     // none: nothing is encrypted
};

// A forked copy must be neither used nor destroyed (base/fork.h).
class Runtime {
 public:
  // Listens, and starts the loop and the engine; it dials the master.
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
  // The newest epoch that the engine knows of; null before the admission.
  [[nodiscard]] peer::Record newest() const {
    const std::lock_guard lock(newest_mutex_);
    return newest_;
  }
  // A thread that has used the engine is gone. Does not block.
  static void thread_ended(const std::shared_ptr<Runtime>& runtime, std::uint64_t thread);
  // Ends the background thread and closes all connections. REQUIRES: not with the turn.
  void shut();

  // -- REQUIRES: the turn
  [[nodiscard]] peer::Engine& engine() { return engine_; }
  // Why the latest attempt to reach the master failed.
  [[nodiscard]] const std::string& dial_failure() const { return dial_failure_; }
  // To be called after every use of the engine: carries out what it asks for.
  void act();
  // What was said to the master is on its way.
  [[nodiscard]] bool control_flushed() const { return control_flushed_.load(); }

 private:
  struct PipeName {
    PeerId with;
    bool ours = false;  // we have dialled it
    std::uint64_t number = 0;
    auto operator<=>(const PipeName&) const = default;
  };
  // A socket, or a pipe through memory.
  struct Wire {
    std::unique_ptr<io::Socket> socket;
    std::unique_ptr<memory::Pipe> pipe;
    PipeName name;  // of the pipe
    [[nodiscard]] ssize_t read(std::span<const iovec> into) const {
      return pipe != nullptr ? pipe->read(into) : socket->read(into);
    }
    [[nodiscard]] ssize_t write(std::span<const iovec> from) const {
      return pipe != nullptr ? pipe->write(from) : socket->write(from);
    }
    [[nodiscard]] bool unsent() const { return socket != nullptr && socket->unsent(); }
    bool local = false;              // both ends are on one host
    std::uint64_t looked_after = 0;  // bytes sent when its buffers were looked at
    bool reading = false;            // waits to be readable
    bool writing = false;            // waits to be writable, or for its next turn
  };
  struct PipeDial {
    std::uint64_t token = 0;
    memory::RegionPtr own;
  };
  // Its other end came, or null: it is closed; or all of that peer are `lost`.
  struct PipeNews {
    PipeName name;
    memory::RegionPtr other;
    std::string lost;
    std::uint64_t until = 0;  // of our own, those with smaller numbers
  };
  struct Control {
    std::unique_ptr<io::Socket> socket;
    std::uint64_t number = 0;  // of the connection: late events of an earlier one are told apart
    wire::Bytes out;
    std::size_t out_at = 0;
    bool writing = false;
    bool closing = false;
  };

  Runtime(RuntimeOptions options, int listener);
  void listen_to_neighbours();

  void accept();
  int accept_one();
  void fail(std::uint64_t id, const std::exception& error);
  void make_room();
  void secure(std::uint64_t id, std::unique_ptr<io::Socket> socket);
  void welcome(std::uint64_t id, std::unique_ptr<io::Socket> socket);
  void dial_control();
  void read_control(std::uint64_t number);
  void write_control();
  void lose_control(const std::string& reason);
  void finish_control();
  void dial(const link::DialRequest& request);
  void dial_pipe(const link::DialRequest& request);
  void dial_relay(const link::DialRequest& request);
  void introduce(const link::DialRequest& request, std::unique_ptr<io::Socket> socket);
  void take_pipe_news();
  void finish_pipe_dial(const PipeName& name, const memory::RegionPtr& other);
  void accept_pipe(const PipeName& name, const memory::RegionPtr& other);
  void lose_pipe(std::uint64_t id, const std::string& reason);
  void lose_pipes(const PeerId& with, const std::string& reason, std::uint64_t until);
  void add_pipe(const PipeName& name, memory::RegionPtr own, const memory::RegionPtr& other,
                std::uint64_t id);
  [[nodiscard]] Pace step_pipes(bool may_sleep);
  void await_control();
  void await_readable(std::uint64_t id);
  void read(std::uint64_t id);
  bool receive(std::uint64_t id);
  void write(std::uint64_t id);
  void close(std::uint64_t id);
  void arm_timer(Duration least);
  [[nodiscard]] peer::EngineOptions engine_options();
  void set_up(io::Socket& socket) const;
  void look_at_buffers(const io::Socket& socket);
  [[nodiscard]] Pace step();

  RuntimeOptions options_;
  io::LoopDriver driver_;
  peer::Engine engine_;
  std::shared_ptr<io::TlsContext> tls_;  // null: no secret
  std::unique_ptr<io::Socket> listener_;
  asio::steady_timer timer_;
  asio::steady_timer accept_again_;
  Instant armed_ = Instant::max();
  Control control_;
  std::uint64_t next_control_ = 1;
  std::string dial_failure_;
  std::shared_ptr<io::Connector> control_dial_;
  std::map<std::uint64_t, std::shared_ptr<io::Connector>> dials_;             // by token
  std::map<std::uint64_t, std::shared_ptr<io::Introduction>> introductions_;  // the same, relayed
  std::map<std::uint64_t, std::shared_ptr<io::Handshake>> handshakes_;        // of accepted ones
  std::map<std::uint64_t, Wire> wires_;                                       // by stripe
  std::uint64_t next_wire_ = 1;
  io::Anteroom anteroom_{io::waiting_limit()};  // of wires
  RareLines rare_;
  std::map<PipeName, PipeDial> pipe_dials_;
  std::map<PipeName, std::uint64_t> pipes_;  // wires
  std::deque<PipeNews> pipe_news_;
  std::uint64_t next_pipe_ = 1;
  Instant pipes_moved_{};
  std::unique_ptr<node::Neighbours> neighbours_;  // null: no memory is shared
  std::vector<std::uint8_t> scratch_;             // what is read from the master
  bool told_of_buffers_ = false;
  bool shut_ = false;

  std::atomic<peer::Standing> standing_{peer::Standing::joining};
  std::atomic<std::size_t> unfinished_{0};
  std::atomic<std::uint32_t> join_failures_{0};
  std::atomic<bool> control_flushed_{true};
  mutable std::mutex newest_mutex_;  // held for a copy, by writers that hold the loop
  peer::Record newest_;
};

}  // namespace pccl::node
