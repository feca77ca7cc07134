// The TLS handshake of one connection, on an event loop.
#pragma once

#include <asio/io_context.hpp>
#include <asio/steady_timer.hpp>
#include <functional>
#include <memory>

#include "pccl/base/error.h"
#include "pccl/io/socket.h"
#include "pccl/wire/codec.h"

namespace pccl::io {

class Tls;

// The time that both ends give a handshake.
inline constexpr Duration kTlsTimeout = std::chrono::seconds(5);

// One handshake. Keeps itself alive until it is over.
// *one thread at a time: whoever drives the loop*
class TlsHandshake : public std::enable_shared_from_this<TlsHandshake> {
 public:
  // Gets the secured connection, or an error: authentication_failed or unreachable, with a text
  // about the other end (Tls::shake). Called once, from the loop, unless cancelled.
  using Done = std::function<void(std::unique_ptr<Socket> connection, const Error& failure)>;
  // `plain_reply`: sent unencrypted to a client whose first message is an unencrypted control
  // message. `plain_prefix`: a connection that begins with these bytes is handed over at once,
  // unencrypted, with nothing read.
  static std::shared_ptr<TlsHandshake> start(asio::io_context& context,
                                             std::unique_ptr<Socket> socket,
                                             std::unique_ptr<Tls> tls, wire::Bytes plain_reply,
                                             Done done, wire::Bytes plain_prefix = {});
  // `done` is not called any more.
  void cancel();

 private:
  TlsHandshake(asio::io_context& context, std::unique_ptr<Socket> socket, std::unique_ptr<Tls> tls,
               wire::Bytes plain_reply, Done done, wire::Bytes plain_prefix);
  void await_readable();
  void go_on();
  void part(const Error& failure);
  void finish(const Error& failure);

  asio::steady_timer deadline_;
  std::unique_ptr<Socket> socket_;
  std::unique_ptr<Tls> tls_;
  wire::Bytes plain_reply_;
  Done done_;
  wire::Bytes plain_prefix_;  // empty: there is none, or this connection does not begin with it
  bool looked_ = false;       // some of its bytes had come
  bool writing_ = false;      // waits to be writable
  bool parting_ = false;      // failed; waits until the other end has read the last bytes
  Error why_;                 // parting: the failure
};

}  // namespace pccl::io
