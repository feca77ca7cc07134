// A peer's connections to other peers: accepts and dials them, over TCP, through the master's relay
// or through shared memory, and moves bytes between them and the engine's stripes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pccl/base/pace.h"
#include "pccl/io/congestion.h"
#include "pccl/io/connector.h"
#include "pccl/io/doorway.h"
#include "pccl/io/tls.h"
#include "pccl/io/workers.h"
#include "pccl/memory/pipe.h"
#include "pccl/node/neighbours.h"
#include "pccl/node/options.h"

namespace pccl::node {

// *one thread at a time: whoever drives the loop*
class PeerConnections {
 public:
  // `tls`: null without a secret. `workers`: move bytes of different connections at the same time,
  // if there is more than one. `act` carries out what the engine asks for after an event.
  PeerConnections(asio::io_context& context, peer::Engine& engine, const RuntimeOptions& options,
                  std::shared_ptr<io::TlsContext> tls, io::Congestion congestion,
                  io::Workers& workers, std::function<void()> act);

  // Takes a listening descriptor over.
  void listen(int descriptor) { doorway_.start(descriptor); }
  // Lets peers of this host find this one, if settings allow that. Without it all bytes go over
  // TCP.
  void listen_to_neighbours();
  void stop();

  // -- the engine's actions
  void dial(const link::DialRequest& request);
  void resume(std::uint64_t id);
  void write(std::uint64_t id);
  void close(std::uint64_t id);
  void carry_out(const peer::LocalityActions& actions);

  // -- shared memory
  [[nodiscard]] bool has_neighbours() const { return neighbours_ != nullptr; }
  // Takes what neighbours have sent and was not read yet.
  void poll() {
    if (neighbours_ != nullptr) neighbours_->poll();
  }
  [[nodiscard]] bool has_pipes() const { return !pipes_.empty(); }
  [[nodiscard]] bool has_pipe_events() const { return !pipe_events_.empty(); }
  void take_pipe_events();
  // Wakes neighbours that sleep until a pipe has something for them.
  void ring_sleepers();
  // Reads and writes all pipes. When nothing moves, and `may_sleep`, they fall asleep.
  [[nodiscard]] Pace step_pipes(bool may_sleep);

 private:
  struct PipeName {
    PeerId with;
    bool ours = false;  // this peer has dialled it
    std::uint64_t number = 0;
    auto operator<=>(const PipeName&) const = default;
  };
  // Carries one stripe: a socket, or a pipe through memory.
  struct Connection {
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
    bool local = false;           // both ends are on one host
    std::uint64_t inspected = 0;  // bytes sent when its buffers were inspected last
    bool reading = false;         // waits to be readable, or for its turn
    bool writing = false;         // waits to be writable, or for its turn
  };
  // The part of a turn that one thread carries out.
  struct Move {
    std::uint64_t id = 0;
    Connection* connection = nullptr;
    link::Stripe* stripe = nullptr;
    bool writes = false;
    bool reads = false;
    bool reads_beside = false;  // another move of this turn reads the same connection
    ssize_t put = 0;            // of the last write
    std::size_t room = 0;       // that was read into
    ssize_t got = 0;
  };
  struct PipeDial {
    std::uint64_t token = 0;
    memory::RegionPtr own;
  };
  // The other end came, or was closed (null), or all pipes with that peer are `lost`.
  struct PipeEvent {
    PipeName name;
    memory::RegionPtr other;
    std::string lost;
    std::uint64_t until = 0;  // lost: of those dialled here, only those with smaller numbers
  };

  [[nodiscard]] io::Doorway::Owner doorway_owner();
  // `local`: both ends are on one host.
  void add_socket(std::uint64_t id, std::unique_ptr<io::Socket> socket, bool local);
  [[nodiscard]] std::unique_ptr<io::Tls> make_tls(const PeerId& listener, bool server) const;
  void inspect_buffers(const io::Socket& socket);
  void read(std::uint64_t id);
  bool receive(std::uint64_t id);
  void wait_writable(std::uint64_t id, Connection& connection);
  void failed(std::uint64_t id, ssize_t result);
  void moved(Connection& connection, const link::Stripe& stripe);
  void heard(std::uint64_t id);

  // -- several connections at a time
  [[nodiscard]] bool shares_work(const Connection& connection) const {
    return workers_.threads() > 1 && connection.socket != nullptr;
  }
  void queue(std::vector<std::uint64_t>& list, std::uint64_t id);
  void take_turn();
  [[nodiscard]] std::vector<Move> next_moves();
  static void carry_out(Move& move);
  void wrote(const Move& move);
  void has_read(const Move& move);

  void all_lost(const PeerId& with, const std::string& reason);
  void dial_pipe(const link::DialRequest& request);
  void finish_pipe_dial(const PipeName& name, const memory::RegionPtr& other);
  void accept_pipe(const PipeName& name, const memory::RegionPtr& other);
  std::uint64_t add_pipe(const PipeName& name, memory::RegionPtr own,
                         const memory::RegionPtr& other);
  void lose_pipe(std::uint64_t id, const std::string& reason);
  void lose_pipes(const PeerId& with, const std::string& reason, std::uint64_t until);

  asio::io_context& context_;
  peer::Engine& engine_;
  const RuntimeOptions& options_;
  const std::shared_ptr<io::TlsContext> tls_;
  const io::Congestion congestion_;
  io::Workers& workers_;
  const std::function<void()> act_;
  io::Doorway doorway_;
  std::map<std::uint64_t, std::shared_ptr<io::Connector>> dials_;  // by token
  std::map<std::uint64_t, Connection> connections_;                // by stripe
  std::vector<std::uint64_t> to_write_;                            // in the next turn
  std::vector<std::uint64_t> to_read_;
  bool turn_due_ = false;
  bool warned_of_buffers_ = false;
  std::unique_ptr<Neighbours> neighbours_;  // null: no memory is shared
  std::map<PipeName, PipeDial> pipe_dials_;
  std::map<PipeName, std::uint64_t> pipes_;  // ids in connections_
  std::deque<PipeEvent> pipe_events_;
  std::uint64_t next_pipe_ = 1;
  Instant pipes_moved_{};
};

}  // namespace pccl::node
