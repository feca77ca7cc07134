// The master's shell: the listener, the peers' control connections, a timer and a thread around one
// Master.
#pragma once

#include <asio/io_context.hpp>
#include <asio/steady_timer.hpp>
#include <condition_variable>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pccl/base/settings.h"
#include "pccl/io/connector.h"
#include "pccl/io/doorway.h"
#include "pccl/io/secret.h"
#include "pccl/io/socket.h"
#include "pccl/io/tls.h"
#include "pccl/io/write_queue.h"
#include "pccl/master/master.h"
#include "pccl/server/relay.h"

namespace pccl::server {

// Serves once: run, then interrupt. *any thread*; a forked copy must be neither used nor destroyed.
class Server {
 public:
  // `listen`: "host:port"; port 0 takes a free one; an empty host is all interfaces.
  // `min_peers`: Options::min_peers. `secret`: peers must know it; without one any peer may join,
  // and nothing is encrypted. `place`: among the masters of the run.
  Server(wire::Address listen, const Settings& settings, io::Secret secret = {},
         std::uint32_t min_peers = 1, master::MasterPlace place = {});
  ~Server();  // interrupts
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Binds the port, and serves on a thread of its own. Call once.
  Status run();
  // The bound host:port. REQUIRES: run() succeeded.
  [[nodiscard]] const std::string& address() const { return address_; }
  // Stops serving: when this returns, all connections are closed and the port is free. May be
  // called again.
  void interrupt();
  // Waits for the server's thread. invalid_usage: it does not run.
  [[nodiscard]] Result<wire::RunStatus> status();
  // Ready once a peer that has left is in no group here, all epochs are decided, and everything is
  // written. Until then its run may need this master.
  [[nodiscard]] std::future<void> departed(const PeerId& peer);
  // Waits for the end of serving. True: the server has stopped or never ran. False: `until` has
  // passed first.
  bool wait(Instant until);

 private:
  struct Connection {
    std::unique_ptr<io::Socket> socket;
    wire::FrameReader reader{wire::kMaxFirstPayload};
    bool known = false;    // the peer has identified itself
    bool member = false;   // and is a member
    bool garbage = false;  // it sent invalid bytes: nothing more is read
    std::size_t held = 0;  // a member's bytes in held_
    io::WriteQueue out;
    std::size_t counted = 0;         // bytes of `out` in queued_
    std::optional<Instant> closing;  // flush until then, then close
  };

  // -- the server's thread
  void serve();
  [[nodiscard]] io::Doorway::Owner doorway_owner();
  void welcome(master::ConnectionId id, std::unique_ptr<io::Socket> socket);
  // Closes a newcomer's connection to free a descriptor. False: there is no newcomer.
  bool free_descriptor();
  void await_readable(master::ConnectionId id, Connection& connection);
  void read(master::ConnectionId id);
  // False: read no more from this connection, which may be gone.
  bool take(master::ConnectionId id, std::span<const std::uint8_t> bytes);
  void act();
  void carry_out(const master::Action& action, std::set<master::ConnectionId>& touched);
  // False: drop the connection.
  bool flush(master::ConnectionId id, Connection& connection);
  void drop(master::ConnectionId id);
  void relay(master::ConnectionId id, const RelayToken& token);
  void tell_departures();
  void make_room();
  void close_one(master::ConnectionId id, const std::string& why);
  void promote(master::ConnectionId id, Connection& connection);
  void count_held(master::ConnectionId id, Connection& connection);
  void arm_timer();

  wire::Address listen_;
  master::Options options_;
  io::Secret secret_;
  const io::TlsOptions tls_options_;
  std::string address_;
  asio::io_context context_;
  std::shared_ptr<io::TlsContext> tls_;  // null: no secret
  master::Master master_;
  Relays relays_;
  io::Doorway doorway_;
  asio::steady_timer timer_;
  Instant armed_ = Instant::max();
  std::map<master::ConnectionId, Connection> connections_;
  std::map<master::ConnectionId, std::shared_ptr<io::Connector>> tries_;  // by asking connection
  io::PendingConnections newcomers_;  // identified non-members: only their bytes are bounded
  std::size_t held_ = 0;              // bytes of members' incomplete messages, over all connections
  std::size_t queued_ = 0;            // bytes that peers have not read yet, over all connections
  std::vector<std::uint8_t> scratch_;
  std::vector<std::pair<PeerId, std::promise<void>>> departures_;  // that are waited for

  std::mutex mutex_;  // guards what follows
  std::condition_variable ended_;
  bool running_ = false;
  std::thread thread_;
};

}  // namespace pccl::server
