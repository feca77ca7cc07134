#include "pccl/io/handshake.h"

#include <sys/socket.h>

#include <array>
#include <asio/post.hpp>
#include <cerrno>
#include <utility>

#include "pccl/io/tls.h"

namespace pccl::io {
namespace {

constexpr Duration kPartTimeout = std::chrono::seconds(1);

}  // namespace

Handshake::Handshake(asio::io_context& context, std::unique_ptr<Socket> socket,
                     std::unique_ptr<Tls> tls, wire::Bytes to_plain, Done done, wire::Bytes exempt)
    : context_(context),
      deadline_(context),
      socket_(std::move(socket)),
      tls_(std::move(tls)),
      to_plain_(std::move(to_plain)),
      done_(std::move(done)),
      exempt_(std::move(exempt)) {}

std::shared_ptr<Handshake> Handshake::start(asio::io_context& context,
                                            std::unique_ptr<Socket> socket,
                                            std::unique_ptr<Tls> tls, wire::Bytes to_plain,
                                            Done done, wire::Bytes exempt) {
  std::shared_ptr<Handshake> made(new Handshake(context, std::move(socket), std::move(tls),
                                                std::move(to_plain), std::move(done),
                                                std::move(exempt)));
  made->deadline_.expires_after(kTlsTimeout);
  made->deadline_.async_wait([made](const asio::error_code& error) {
    if (error) return;
    made->finish(
        made->parting_
            ? made->why_
            : Error{Code::unreachable, "did not finish the TLS handshake in 5 seconds", {}, {}});
  });
  // Not from inside: the caller does not have us yet.
  asio::post(context, [made] {
    made->go_on();
    made->await_readable();
  });
  return made;
}

void Handshake::await_readable() {
  if (!done_) return;
  socket_->wait_readable([self = shared_from_this()](const asio::error_code& error) {
    if (error || !self->done_) return;
    self->go_on();
    self->await_readable();
  });
}

void Handshake::go_on() {
  if (!done_) return;
  if (parting_) {
    std::array<std::uint8_t, 4096> nowhere;
    const iovec into{nowhere.data(), nowhere.size()};
    const ssize_t got = receive(socket_->raw(), {&into, 1});
    if (got == 0 || (got < 0 && got != -EAGAIN)) finish(why_);
    return;
  }
  if (!exempt_.empty()) {
    const Begins begins = begins_with(socket_->raw(), exempt_);
    if (begins == Begins::yes) return finish({});
    if (begins == Begins::not_yet) return;
    // Once: if it is readable and has no more, that was all.
    if (begins == Begins::perhaps && !std::exchange(looked_, true)) return;
    exempt_.clear();
  }
  const Status status = tls_->shake(socket_->raw());
  if (!status) return part(status.error());
  if (tls_->established()) {
    socket_->secure(std::move(tls_));
    return finish({});
  }
  if (!tls_->unsent() || std::exchange(writing_, true)) return;
  socket_->wait_writable([self = shared_from_this()](const asio::error_code& error) {
    self->writing_ = false;
    if (!error) self->go_on();
  });
}

// What was said last must not be lost to a reset, which closing at once might be.
void Handshake::part(const Error& failure) {
  if (failure.code != Code::authentication_failed) return finish(failure);
  if (tls_->met_plain_peer() && !to_plain_.empty()) {
    const iovec from{to_plain_.data(), to_plain_.size()};
    (void)transmit(socket_->raw(), {&from, 1});
  }
  ::shutdown(socket_->raw(), SHUT_WR);
  parting_ = true;
  why_ = failure;
  deadline_.expires_after(kPartTimeout);
  deadline_.async_wait([self = shared_from_this()](const asio::error_code& error) {
    if (!error) self->finish(self->why_);
  });
}

void Handshake::finish(const Error& failure) {
  if (!done_) return;
  const Done done = std::exchange(done_, nullptr);
  deadline_.cancel();
  std::unique_ptr<Socket> socket = std::move(socket_);
  if (!failure.reason.empty()) socket.reset();
  done(std::move(socket), failure);
}

void Handshake::cancel() {
  done_ = nullptr;
  deadline_.cancel();
  socket_.reset();
}

}  // namespace pccl::io
