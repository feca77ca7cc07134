#include "pccl/io/connector.h"

#include <asio/post.hpp>
#include <utility>

#include "pccl/io/address.h"
#include "pccl/io/tls.h"

namespace pccl::io {
namespace {

constexpr Duration kStagger = std::chrono::milliseconds(250);
constexpr std::size_t kMaxEndpoints = 16;

}  // namespace

Connector::Connector(asio::io_context& context, Done done, std::unique_ptr<Tls> tls)
    : context_(context),
      deadline_(context),
      stagger_(context),
      done_(std::move(done)),
      tls_(std::move(tls)) {}

std::shared_ptr<Connector> Connector::start(asio::io_context& context, const wire::Address& address,
                                            Duration timeout, Done done, std::unique_ptr<Tls> tls) {
  std::shared_ptr<Connector> made(new Connector(context, std::move(done), std::move(tls)));
  made->begin(address, timeout);
  return made;
}

void Connector::begin(const wire::Address& address, Duration timeout) {
  auto self = shared_from_this();
  deadline_.expires_after(timeout);
  deadline_.async_wait([self](const asio::error_code& error) {
    if (!error) self->finish(nullptr, self->failure_.empty() ? "no answer" : self->failure_);
  });
  if (const auto numeric = numeric_endpoint(address)) {
    endpoints_.push_back(*numeric);
    asio::post(context_, [self] { self->try_next(); });
    return;
  }
  auto resolver = std::make_shared<asio::ip::tcp::resolver>(context_);
  resolver->async_resolve(
      address.host, std::to_string(address.port), asio::ip::tcp::resolver::numeric_service,
      [self, resolver, host = address.host](const asio::error_code& error, const auto& results) {
        if (error) return self->finish(nullptr, "cannot resolve " + host + ": " + error.message());
        for (const auto& result : results) {
          if (self->endpoints_.size() < kMaxEndpoints)
            self->endpoints_.push_back(result.endpoint());
        }
        self->try_next();
      });
}

void Connector::try_next() {
  while (done_ && next_ < endpoints_.size()) {
    const asio::ip::tcp::endpoint endpoint = endpoints_[next_++];
    const int descriptor = connect_to(endpoint);
    if (descriptor < 0) {
      failure_ = to_string(endpoint) + ": " + error_text(-descriptor);
      continue;
    }
    const std::size_t attempt = attempts_.size();
    attempts_.push_back({endpoint, std::make_unique<Socket>(context_, descriptor)});
    ++open_;
    auto self = shared_from_this();
    attempts_.back().socket->wait_writable([self, attempt](const asio::error_code& error) {
      if (!error) self->writable(attempt);
    });
    if (next_ < endpoints_.size()) {
      stagger_.expires_after(kStagger);
      stagger_.async_wait([self](const asio::error_code& error) {
        if (!error) self->try_next();
      });
    }
    return;
  }
  if (done_ && open_ == 0) finish(nullptr, failure_.empty() ? "the host has no address" : failure_);
}

void Connector::writable(std::size_t attempt) {
  if (!done_) return;
  Attempt& tried = attempts_[attempt];
  if (const int number = connect_error(tried.socket->raw()); number != 0) {
    failure_ = to_string(tried.to) + ": " + error_text(number);
    tried.socket.reset();
    --open_;
    return try_next();
  }
  // Registered anew: a descriptor that has waited to be writable is reported as such for ever
  // after, with every event.
  finish(std::make_unique<Socket>(context_, tried.socket->give()), {});
}

void Connector::finish(std::unique_ptr<Socket> connection, const std::string& failure) {
  if (!done_) return;
  Done done = std::exchange(done_, nullptr);
  const Error reason{Code::unreachable, failure, {}, {}};
  cancel();
  if (connection == nullptr || tls_ == nullptr) return done(std::move(connection), reason);
  handshake_ =
      Handshake::start(context_, std::move(connection), std::move(tls_), {}, std::move(done));
}

void Connector::cancel() {
  done_ = nullptr;
  deadline_.cancel();
  stagger_.cancel();
  attempts_.clear();
  if (handshake_) handshake_->cancel();
  handshake_.reset();
}

}  // namespace pccl::io
