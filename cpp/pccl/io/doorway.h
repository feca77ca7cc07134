// Where other processes connect: accepts connections, runs their TLS handshakes, and bounds those
// whose other end has not identified itself.
#pragma once

#include <asio/io_context.hpp>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "pccl/base/allowance.h"
#include "pccl/base/log.h"
#include "pccl/io/acceptor.h"
#include "pccl/io/pending_connections.h"
#include "pccl/io/socket.h"
#include "pccl/io/tls_handshake.h"

namespace pccl::io {

// *one thread at a time: whoever drives the loop*
class Doorway {
 public:
  // Called from the loop.
  struct Owner {
    std::string log_name;
    // This end of a new connection; null closes the connection. Empty: nothing is encrypted.
    std::function<std::unique_ptr<Tls>()> tls;
    wire::Bytes plain_reply;   // see TlsHandshake::start
    wire::Bytes plain_prefix;  // see TlsHandshake::start
    // The connection stays pending until pending().remove(id). If this throws, it is dropped.
    std::function<void(std::uint64_t id, std::unique_ptr<Socket> socket)> accepted;
    // Closes an accepted connection, if there is one with this id. False: it stays open, since its
    // other end has identified itself meanwhile.
    std::function<bool(std::uint64_t id, const std::string& reason)> drop;
    std::function<bool()> free_descriptor;  // see Acceptor::Events
    std::function<void()> act;              // after each use of the others
  };
  Doorway(asio::io_context& context, Owner owner);

  // Takes a listening descriptor over. Call once.
  void start(int descriptor) { acceptor_.start(descriptor); }
  // Goes on after an exception from the owner. Does nothing otherwise.
  void resume() { acceptor_.resume(); }
  void stop();

  // Ids of accepted connections grow. The owner may take more of them.
  [[nodiscard]] std::uint64_t next_id() { return next_id_++; }
  [[nodiscard]] const Socket& listener() const { return acceptor_.listener(); }
  [[nodiscard]] PendingConnections& pending() { return pending_; }
  // Drops pending connections until they are within their limits.
  void make_room();
  // Ends the handshake, and counts the connection as pending no more.
  void forget(std::uint64_t id);
  // Writes a line to the log, at most so often as RareLines allows.
  void tell(LogLevel level, const std::string& text);

 private:
  void accept(int descriptor);
  void hand_over(std::uint64_t id, std::unique_ptr<Socket> socket);
  void fail(std::uint64_t id, const std::exception& error);

  asio::io_context& context_;
  const Owner owner_;
  Acceptor acceptor_;
  std::map<std::uint64_t, std::shared_ptr<TlsHandshake>> handshakes_;
  PendingConnections pending_{descriptor_share(kMaxPending)};
  std::uint64_t next_id_ = 1;
  RareLines rare_;
};

}  // namespace pccl::io
