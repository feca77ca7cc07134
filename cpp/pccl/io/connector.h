// Connects to a host by name or number, at all of its addresses.
#pragma once

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/steady_timer.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/io/handshake.h"
#include "pccl/io/socket.h"
#include "pccl/wire/records.h"

namespace pccl::io {

// One attempt: addresses are tried in the resolver's order, the next one when the one before fails
// or does not answer quickly; the first that connects wins. Keeps itself alive until it is over.
// *one thread at a time: whoever drives the loop*
class Connector : public std::enable_shared_from_this<Connector> {
 public:
  // Gets the connection, or why there is none (see Handshake; else unreachable). Called once, from
  // the loop, unless cancelled.
  using Done = std::function<void(std::unique_ptr<Socket> connection, const Error& failure)>;
  // `tls`: this end of the connection; null: nothing is encrypted.
  static std::shared_ptr<Connector> start(asio::io_context& context, const wire::Address& address,
                                          Duration timeout, Done done,
                                          std::unique_ptr<Tls> tls = nullptr);
  // `done` is not called any more.
  void cancel();

 private:
  Connector(asio::io_context& context, Done done, std::unique_ptr<Tls> tls);
  void begin(const wire::Address& address, Duration timeout);
  void try_next();
  void writable(std::size_t attempt);
  void finish(std::unique_ptr<Socket> connection, const std::string& failure);

  asio::io_context& context_;
  asio::steady_timer deadline_;
  asio::steady_timer stagger_;
  std::vector<asio::ip::tcp::endpoint> endpoints_;
  std::size_t next_ = 0;
  struct Attempt {
    asio::ip::tcp::endpoint to;
    std::unique_ptr<Socket> socket;  // null: failed
  };
  std::vector<Attempt> attempts_;
  std::size_t open_ = 0;
  std::string failure_;
  Done done_;
  std::unique_ptr<Tls> tls_;
  std::shared_ptr<Handshake> handshake_;
};

}  // namespace pccl::io
