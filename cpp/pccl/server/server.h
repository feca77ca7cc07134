// The master on the network: a listener, the peers' control connections, a timer and a thread
// around one Master.
#pragma once

#include <asio/io_context.hpp>
#include <asio/steady_timer.hpp>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "pccl/base/allowance.h"
#include "pccl/base/settings.h"
#include "pccl/io/anteroom.h"
#include "pccl/io/connector.h"
#include "pccl/io/handshake.h"
#include "pccl/io/secret.h"
#include "pccl/io/socket.h"
#include "pccl/io/tls.h"
#include "pccl/master/master.h"
#include "pccl/server/relay.h"

namespace pccl::server {

// Serves once: run, interrupt, and no more. *any thread*; a forked copy must be neither used nor
// destroyed.
class Server {
 public:
  // `listen`: "host:port"; port 0 takes a free one; an empty host is all interfaces.
  // `min_peers`: Options::min_peers. `secret`: what peers must know; none: nobody is asked, and
  // nothing is encrypted.
  Server(wire::Address listen, const Settings& settings, io::Secret secret = {},
         std::uint32_t min_peers = 1);
  ~Server();  // interrupts
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Binds, and serves on a thread of its own. Call once.
  Status run();
  // host:port really bound. REQUIRES: run() succeeded.
  [[nodiscard]] const std::string& address() const { return address_; }
  // Ends it: when this returns, all connections are closed and the port is free. May be called
  // again.
  void interrupt();
  // True when it has ended (or never ran), false when `until` has passed first.
  bool wait(Instant until);

 private:
  struct Connection {
    std::unique_ptr<io::Socket> socket;
    wire::FrameReader reader{wire::kMaxFirstPayload};
    bool known = false;    // the peer on it has said who it is
    bool member = false;   // and is one
    std::size_t held = 0;  // of a member, in held_
    wire::Bytes out;
    std::size_t out_at = 0;
    std::size_t counted = 0;  // of it, in queued_
    bool writing = false;
    std::optional<Instant> closing;  // flush until then, then close
  };

  // -- the server's thread
  void serve();
  void accept();
  int accept_one();
  void secure(master::ConnectionId id, std::unique_ptr<io::Socket> socket);
  void welcome(master::ConnectionId id, std::unique_ptr<io::Socket> socket);
  void await_readable(master::ConnectionId id, Connection& connection);
  void read(master::ConnectionId id);
  void act();
  // False when the connection is no more.
  bool flush(master::ConnectionId id, Connection& connection);
  bool write(master::ConnectionId id, Connection& connection);
  void count(Connection& connection);
  void fail(master::ConnectionId id, const std::exception& error);
  void drop(master::ConnectionId id);
  void relay(master::ConnectionId id, const PeerId& token);
  void make_room();
  void close_one(master::ConnectionId id, const std::string& why);
  void promote(master::ConnectionId id, Connection& connection);
  void count_held(master::ConnectionId id, Connection& connection);
  void arm_timer();

  wire::Address listen_;
  master::Options options_;
  io::Secret secret_;
  const std::uint64_t key_update_records_;
  std::string address_;
  asio::io_context context_;
  std::shared_ptr<io::TlsContext> tls_;  // null: no secret
  master::Master master_;
  Relays relays_;
  std::unique_ptr<io::Socket> listener_;
  asio::steady_timer timer_;
  asio::steady_timer accept_again_;
  Instant armed_ = Instant::max();
  bool accepting_ = false;
  std::map<master::ConnectionId, Connection> connections_;
  std::map<master::ConnectionId, std::shared_ptr<io::Handshake>> handshakes_;
  std::map<master::ConnectionId, std::shared_ptr<io::Connector>> tries_;  // by who asked
  io::Anteroom anteroom_{io::waiting_limit()};
  io::Anteroom newcomers_;  // who has said who it is, and is no member: of their bytes alone
  std::size_t held_ = 0;    // by members' messages that are not whole yet, over all connections
  std::size_t queued_ = 0;  // bytes that peers have not fetched yet, over all connections
  RareLines rare_;
  master::ConnectionId next_ = 1;
  std::vector<std::uint8_t> scratch_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable ended_;
  bool running_ = false;
  std::thread thread_;
};

}  // namespace pccl::server
