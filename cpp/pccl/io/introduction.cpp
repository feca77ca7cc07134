#include "pccl/io/introduction.h"

#include <algorithm>
#include <asio/post.hpp>
#include <cerrno>
#include <utility>

namespace pccl::io {

Introduction::Introduction(asio::io_context& context, std::unique_ptr<Socket> socket,
                           wire::Bytes words, wire::Bytes answer, Handshake::Done done,
                           std::unique_ptr<Tls> tls)
    : context_(context),
      deadline_(context),
      socket_(std::move(socket)),
      words_(std::move(words)),
      answer_(std::move(answer)),
      done_(std::move(done)),
      tls_(std::move(tls)) {}

std::shared_ptr<Introduction> Introduction::start(asio::io_context& context,
                                                  std::unique_ptr<Socket> socket, wire::Bytes words,
                                                  wire::Bytes answer, Duration timeout,
                                                  Handshake::Done done, std::unique_ptr<Tls> tls) {
  std::shared_ptr<Introduction> made(new Introduction(context, std::move(socket), std::move(words),
                                                      std::move(answer), std::move(done),
                                                      std::move(tls)));
  made->deadline_.expires_after(timeout);
  made->deadline_.async_wait([made](const asio::error_code& error) {
    if (!error) made->finish("the other end has not come");
  });
  // Not from inside: the caller does not have us yet.
  asio::post(context, [made] {
    made->say();
    made->hear();
  });
  return made;
}

void Introduction::say() {
  while (done_ && said_ < words_.size()) {
    const iovec from{words_.data() + said_, words_.size() - said_};
    const ssize_t put = socket_->write({&from, 1});
    if (put == -EAGAIN) {
      return socket_->wait_writable([self = shared_from_this()](const asio::error_code& error) {
        if (!error) self->say();
      });
    }
    if (put < 0) return finish(error_text(static_cast<int>(-put)));
    said_ += static_cast<std::size_t>(put);
  }
}

void Introduction::hear() {
  while (done_ && heard_ < answer_.size()) {
    std::array<std::uint8_t, 64> piece;
    const iovec into{piece.data(), std::min(piece.size(), answer_.size() - heard_)};
    const ssize_t got = socket_->read({&into, 1});
    if (got == -EAGAIN) {
      return socket_->wait_readable([self = shared_from_this()](const asio::error_code& error) {
        if (!error) self->hear();
      });
    }
    if (got <= 0) return finish("it has closed the connection");
    const auto count = static_cast<std::size_t>(got);
    if (!std::equal(piece.begin(), piece.begin() + got,
                    answer_.begin() + static_cast<std::ptrdiff_t>(heard_)))
      return finish("it answers something else");
    heard_ += count;
  }
  if (done_) finish({});
}

void Introduction::finish(const std::string& failure) {
  if (!done_) return;
  Handshake::Done done = std::exchange(done_, nullptr);
  deadline_.cancel();
  if (!failure.empty()) {
    socket_.reset();
    return done(nullptr, {Code::unreachable, failure, {}, {}});
  }
  // Registered anew: see Connector::writable.
  auto socket = std::make_unique<Socket>(context_, socket_->give());
  socket_.reset();
  if (tls_ == nullptr) return done(std::move(socket), {Code::unreachable, {}, {}, {}});
  handshake_ = Handshake::start(context_, std::move(socket), std::move(tls_), {}, std::move(done));
}

void Introduction::cancel() {
  done_ = nullptr;
  deadline_.cancel();
  socket_.reset();
  if (handshake_ != nullptr) handshake_->cancel();
}

}  // namespace pccl::io
