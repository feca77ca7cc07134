#include "pccl/io/tls_handshake.h"

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

TlsHandshake::TlsHandshake(asio::io_context& context, std::unique_ptr<Socket> socket,
                           std::unique_ptr<Tls> tls, wire::Bytes plain_reply, Done done,
                           wire::Bytes plain_prefix)
    : deadline_(context),
      socket_(std::move(socket)),
      tls_(std::move(tls)),
      plain_reply_(std::move(plain_reply)),
      done_(std::move(done)),
      plain_prefix_(std::move(plain_prefix)) {}

std::shared_ptr<TlsHandshake> TlsHandshake::start(asio::io_context& context,
                                                  std::unique_ptr<Socket> socket,
                                                  std::unique_ptr<Tls> tls, wire::Bytes plain_reply,
                                                  Done done, wire::Bytes plain_prefix) {
  std::shared_ptr<TlsHandshake> made(new TlsHandshake(context, std::move(socket), std::move(tls),
                                                      std::move(plain_reply), std::move(done),
                                                      std::move(plain_prefix)));
  made->deadline_.expires_after(kTlsTimeout);
  made->deadline_.async_wait([made](const asio::error_code& error) {
    if (error) return;
    made->finish(made->parting_
                     ? made->why_
                     : Error{Code::unreachable, "did not finish the TLS handshake in 5 seconds"});
  });
  // Posted, since `done` must not be called before the caller has the returned pointer.
  asio::post(context, [made] {
    made->go_on();
    made->await_readable();
  });
  return made;
}

void TlsHandshake::await_readable() {
  if (!done_) return;
  socket_->wait_readable([self = shared_from_this()](const asio::error_code& error) {
    if (error || !self->done_) return;
    self->go_on();
    self->await_readable();
  });
}

void TlsHandshake::go_on() {
  if (!done_) return;
  if (parting_) {
    std::array<std::uint8_t, 4096> nowhere;
    const iovec into{nowhere.data(), nowhere.size()};
    const ssize_t got = receive(socket_->raw(), {&into, 1});
    if (got == 0 || (got < 0 && got != -EAGAIN)) finish(why_);
    return;
  }
  if (!plain_prefix_.empty()) {
    const Begins begins = begins_with(socket_->raw(), plain_prefix_);
    if (begins == Begins::yes) return finish({});
    if (begins == Begins::not_yet) return;
    // Only once: if it is readable again without more bytes, it has ended.
    if (begins == Begins::perhaps && !std::exchange(looked_, true)) return;
    plain_prefix_.clear();
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

// Closing at once might send a reset, which could overtake the last bytes.
void TlsHandshake::part(const Error& failure) {
  if (failure.code != Code::authentication_failed) return finish(failure);
  if (tls_->met_plain_peer() && !plain_reply_.empty()) {
    const iovec from{plain_reply_.data(), plain_reply_.size()};
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

void TlsHandshake::finish(const Error& failure) {
  if (!done_) return;
  const Done done = std::exchange(done_, nullptr);
  deadline_.cancel();
  std::unique_ptr<Socket> socket = std::move(socket_);
  if (!failure.reason.empty()) socket.reset();
  done(std::move(socket), failure);
}

void TlsHandshake::cancel() {
  done_ = nullptr;
  deadline_.cancel();
  socket_.reset();
}

}  // namespace pccl::io
