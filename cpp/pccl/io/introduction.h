// From a connection to one that somebody has put through to another end: says who we are, waits to
// be put through, and then, with TLS, shakes hands with whoever is there.
#pragma once

#include <asio/io_context.hpp>
#include <asio/steady_timer.hpp>
#include <memory>

#include "pccl/io/handshake.h"
#include "pccl/io/socket.h"
#include "pccl/io/tls.h"
#include "pccl/wire/codec.h"

namespace pccl::io {

// Keeps itself alive until it is over. *one thread at a time: whoever drives the loop*
class Introduction : public std::enable_shared_from_this<Introduction> {
 public:
  // Says `words`, and reads `answer` and not a byte more. `tls`: then this end's handshake; null:
  // nothing is encrypted. `done` is called once, from the loop, unless cancelled.
  static std::shared_ptr<Introduction> start(asio::io_context& context,
                                             std::unique_ptr<Socket> socket, wire::Bytes words,
                                             wire::Bytes answer, Duration timeout,
                                             Handshake::Done done, std::unique_ptr<Tls> tls);
  // `done` is not called any more.
  void cancel();

 private:
  Introduction(asio::io_context& context, std::unique_ptr<Socket> socket, wire::Bytes words,
               wire::Bytes answer, Handshake::Done done, std::unique_ptr<Tls> tls);
  void say();
  void hear();
  void finish(const std::string& failure);

  asio::io_context& context_;
  asio::steady_timer deadline_;
  std::unique_ptr<Socket> socket_;
  wire::Bytes words_;
  std::size_t said_ = 0;
  const wire::Bytes answer_;
  std::size_t heard_ = 0;
  Handshake::Done done_;
  std::unique_ptr<Tls> tls_;
  std::shared_ptr<Handshake> handshake_;
};

}  // namespace pccl::io
