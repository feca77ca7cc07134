// From a connection to one that is encrypted: the TLS handshake on an event loop.
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

// What both ends have for it.
inline constexpr Duration kTlsTimeout = std::chrono::seconds(5);

// One handshake. Keeps itself alive until it is over.
// *one thread at a time: whoever drives the loop*
class Handshake : public std::enable_shared_from_this<Handshake> {
 public:
  // Gets the secured connection, or why there is none: authentication_failed or unreachable, with
  // what the other end did (Tls::shake). Called once, from the loop, unless cancelled.
  using Done = std::function<void(std::unique_ptr<Socket> connection, const Error& failure)>;
  // `to_plain`: what is said, in the clear, to who says a control message in the clear.
  // `exempt`: a connection that begins with these bytes is handed over as it is, with nothing read.
  static std::shared_ptr<Handshake> start(asio::io_context& context, std::unique_ptr<Socket> socket,
                                          std::unique_ptr<Tls> tls, wire::Bytes to_plain, Done done,
                                          wire::Bytes exempt = {});
  // `done` is not called any more.
  void cancel();
  // REQUIRES: `done` was not called.
  [[nodiscard]] const Socket& socket() const { return *socket_; }

 private:
  Handshake(asio::io_context& context, std::unique_ptr<Socket> socket, std::unique_ptr<Tls> tls,
            wire::Bytes to_plain, Done done, wire::Bytes exempt);
  void await_readable();
  void go_on();
  void part(const Error& failure);
  void finish(const Error& failure);

  asio::io_context& context_;
  asio::steady_timer deadline_;
  std::unique_ptr<Socket> socket_;
  std::unique_ptr<Tls> tls_;
  wire::Bytes to_plain_;
  Done done_;
  wire::Bytes exempt_;    // empty: nobody is, or this one is not
  bool looked_ = false;   // some of them had come
  bool writing_ = false;  // waits to be writable
  bool parting_ = false;  // all is said; waits for the other end to have read it
  Error why_;             // parting: the failure
};

}  // namespace pccl::io
