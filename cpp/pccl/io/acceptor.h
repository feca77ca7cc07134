// Accepting connections at one listening socket.
#pragma once

#include <asio/io_context.hpp>
#include <asio/steady_timer.hpp>
#include <functional>
#include <memory>

#include "pccl/io/socket.h"

namespace pccl::io {

// Accepts a bounded number of connections in one turn of the loop, and pauses when descriptors run
// out. *one thread at a time: whoever drives the loop*
class Acceptor {
 public:
  // Called from the loop.
  struct Events {
    std::function<void(int descriptor)> accepted;  // takes the descriptor over
    std::function<void()> turn_ended;
    // No descriptor is left. True: one was freed. May be empty.
    std::function<bool()> free_descriptor;
    std::function<void(int error_number)> paused;  // may be empty
  };
  Acceptor(asio::io_context& context, Events events)
      : context_(context), events_(std::move(events)), timer_(context) {}
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Takes a listening descriptor over. Call once.
  void start(int descriptor);
  // Goes on after an exception from one of `events`. Does nothing otherwise.
  void resume();
  void stop();
  // REQUIRES: started, and not stopped.
  [[nodiscard]] const Socket& listener() const { return *listener_; }

 private:
  void turn();

  asio::io_context& context_;
  const Events events_;
  std::unique_ptr<Socket> listener_;
  asio::steady_timer timer_;
  bool waiting_ = false;  // for a connection, or for the end of a pause
  // Expires with this object: a handler that is already due may run after its end.
  std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);
};

}  // namespace pccl::io
