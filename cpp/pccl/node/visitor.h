// A short connection to a master, of a process that asks something and does not join.
#pragma once

#include <asio/io_context.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "pccl/base/clock.h"
#include "pccl/base/error.h"
#include "pccl/base/settings.h"
#include "pccl/io/secret.h"
#include "pccl/io/socket.h"
#include "pccl/io/tls.h"
#include "pccl/wire/messages.h"
#include "pccl/wire/status.h"

namespace pccl::node {

// *one thread: the caller's*
class Visitor {
 public:
  // `secret`: the run's; without one nothing is encrypted. REQUIRES: the arguments outlive it.
  Visitor(const wire::Address& master, const Settings& settings, const io::Secret& secret)
      : master_(master), settings_(settings), secret_(secret) {}

  // Takes the place of an earlier connection. unreachable, authentication_failed.
  Status connect();
  Status say(const wire::Message& message);
  // The next message. unreachable: none within `most`; refused: the master refuses, with its
  // reason.
  [[nodiscard]] Result<wire::Frame> hear(Duration most);

  // Runs the event loop until `over()`, or for `most`.
  template <class Over>
  void drive(Duration most, Over over) {
    const Instant until = clock_now() + most;
    context_.restart();
    while (!over() && clock_now() < until) context_.run_one_until(until);
  }

  [[nodiscard]] asio::io_context& context() { return context_; }
  [[nodiscard]] io::TlsContext* tls() { return tls_.get(); }  // null: there is no secret
  // The master's address, as it was reached. REQUIRES: connect() succeeded.
  [[nodiscard]] std::string address() const;

 private:
  const wire::Address& master_;
  const Settings& settings_;
  const io::Secret& secret_;
  asio::io_context context_;
  std::shared_ptr<io::TlsContext> tls_;
  std::unique_ptr<io::Socket> socket_;
  wire::FrameReader reader_;
};

// Reads from a socket until `take` returns false. Calls `ended` at the end of the connection.
void read_all(io::Socket& socket, const std::function<bool(std::span<const std::uint8_t>)>& take,
              const std::function<void()>& ended);

// -- for operators. Each takes some 10 s at most. Errors: as of Visitor.

[[nodiscard]] Result<wire::RunStatus> ask_status(const wire::Address& master,
                                                 const Settings& settings,
                                                 const io::Secret& secret);
// Returns what was done. invalid_argument: nothing was, with the reason.
[[nodiscard]] Result<std::string> command(const wire::Address& master, const wire::Command& command,
                                          const Settings& settings, const io::Secret& secret);

}  // namespace pccl::node
