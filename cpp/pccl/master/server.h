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
#include "pccl/master/master.h"
#include "pccl/master/relay.h"
#include "pccl/net/anteroom.h"
#include "pccl/net/connector.h"
#include "pccl/net/handshake.h"
#include "pccl/net/secret.h"
#include "pccl/net/socket.h"
#include "pccl/net/tls.h"

namespace pccl::master {

// Serves once: run, interrupt, and no more. *any thread*; a forked copy must be neither used nor
// destroyed.
class Server {
 public:
  // `listen`: "host:port"; port 0 takes a free one; an empty host is all interfaces.
  // `min_peers`: Options::min_peers. `secret`: what peers must know; none: nobody is asked, and
  // nothing is encrypted.
  Server(wire::Address listen, const Settings& settings, net::Secret secret = {},
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
    std::unique_ptr<net::Socket> socket;
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
  void secure(ConnectionId id, std::unique_ptr<net::Socket> socket);
  void welcome(ConnectionId id, std::unique_ptr<net::Socket> socket);
  void await_readable(ConnectionId id, Connection& connection);
  void read(ConnectionId id);
  void act();
  // False when the connection is no more.
  bool flush(ConnectionId id, Connection& connection);
  bool write(ConnectionId id, Connection& connection);
  void count(Connection& connection);
  void fail(ConnectionId id, const std::exception& error);
  void drop(ConnectionId id);
  void relay(ConnectionId id, const PeerId& token);
  void make_room();
  void close_one(ConnectionId id, const std::string& why);
  void promote(ConnectionId id, Connection& connection);
  void count_held(ConnectionId id, Connection& connection);
  void arm_timer();

  wire::Address listen_;
  Options options_;
  net::Secret secret_;
  const std::uint64_t key_update_records_;
  std::string address_;
  asio::io_context context_;
  std::shared_ptr<net::TlsContext> tls_;  // null: no secret
  Master master_;
  Relays relays_;
  std::unique_ptr<net::Socket> listener_;
  asio::steady_timer timer_;
  asio::steady_timer accept_again_;
  Instant armed_ = Instant::max();
  bool accepting_ = false;
  std::map<ConnectionId, Connection> connections_;
  std::map<ConnectionId, std::shared_ptr<net::Handshake>> handshakes_;
  std::map<ConnectionId, std::shared_ptr<net::Connector>> tries_;  // by who asked
  net::Anteroom anteroom_{net::waiting_limit()};
  net::Anteroom newcomers_;  // who has said who it is, and is no member: of their bytes alone
  std::size_t held_ = 0;     // by members' messages that are not whole yet, over all connections
  std::size_t queued_ = 0;   // bytes that peers have not fetched yet, over all connections
  RareLines rare_;
  ConnectionId next_ = 1;
  std::vector<std::uint8_t> scratch_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable ended_;
  bool running_ = false;
  std::thread thread_;
};

}  // namespace pccl::master
