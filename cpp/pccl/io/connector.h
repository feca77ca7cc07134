// Connects to a host by name or number, at all of its addresses; on request, through the master's
// relay to another peer.
#pragma once

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/steady_timer.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/io/socket.h"
#include "pccl/io/tls_handshake.h"
#include "pccl/io/write_queue.h"
#include "pccl/wire/records.h"

namespace pccl::io {

// One attempt. Tries addresses in the resolver's order, each when the one before fails or does not
// answer quickly; the first that connects wins. Keeps itself alive until it is over.
// *one thread at a time: whoever drives the loop*
class Connector : public std::enable_shared_from_this<Connector> {
 public:
  // Gets the connection, or an error: unreachable, or that of the TLS handshake. Called once, from
  // the loop, unless cancelled.
  using Done = std::function<void(std::unique_ptr<Socket> connection, const Error& failure)>;
  // For a connection to the master that the master relays: what this end writes first, and the
  // answer once the other end has come. Nothing behind the answer is read.
  struct Relay {
    wire::Bytes request;
    wire::Bytes answer;
  };
  // Times to look a name up, to connect, and again to be relayed. A look-up takes five seconds and
  // more if the first name server does not answer.
  struct Times {
    Duration connect;
    Duration look_up = std::chrono::seconds(15);
  };
  // `tls`: this end of the connection; null: nothing is encrypted. `relay`: empty for a direct
  // connection.
  static std::shared_ptr<Connector> start(asio::io_context& context, const wire::Address& address,
                                          const Times& times, Done done,
                                          std::unique_ptr<Tls> tls = nullptr, Relay relay = {});
  // `done` is not called any more.
  void cancel();

 private:
  Connector(asio::io_context& context, const Times& times, Done done, std::unique_ptr<Tls> tls,
            Relay relay);
  void begin(const wire::Address& address);
  void arm_deadline(Duration time);
  void try_next();
  void writable(std::size_t attempt);
  [[nodiscard]] Result<std::unique_ptr<Socket>> again(Socket& socket);
  void write_request();
  void read_answer();
  void finish(const std::string& failure);

  asio::io_context& context_;
  const Times times_;
  asio::steady_timer deadline_;
  asio::steady_timer stagger_;
  std::uint64_t look_up_ = 0;  // 0: there was none
  std::vector<asio::ip::tcp::endpoint> endpoints_;
  std::size_t next_ = 0;
  struct Attempt {
    asio::ip::tcp::endpoint to;
    std::unique_ptr<Socket> socket;  // null: failed
  };
  std::vector<Attempt> attempts_;
  std::size_t open_ = 0;
  std::string failure_;
  std::unique_ptr<Socket> socket_;  // connected
  WriteQueue request_;
  wire::Bytes answer_;  // still to come
  Done done_;
  std::unique_ptr<Tls> tls_;
  std::shared_ptr<TlsHandshake> handshake_;
};

}  // namespace pccl::io
