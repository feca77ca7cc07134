#include "pccl/io/connector.h"

#include <algorithm>
#include <asio/post.hpp>
#include <cerrno>
#include <utility>

#include "pccl/io/address.h"
#include "pccl/io/tls.h"

namespace pccl::io {
namespace {

constexpr Duration kStagger = std::chrono::milliseconds(250);
constexpr std::size_t kMaxEndpoints = 16;

}  // namespace

Connector::Connector(asio::io_context& context, Duration timeout, Done done,
                     std::unique_ptr<Tls> tls, Relay relay)
    : context_(context),
      timeout_(timeout),
      deadline_(context),
      stagger_(context),
      answer_(std::move(relay.answer)),
      done_(std::move(done)),
      tls_(std::move(tls)) {
  request_.append(relay.request);
}

std::shared_ptr<Connector> Connector::start(asio::io_context& context, const wire::Address& address,
                                            Duration timeout, Done done, std::unique_ptr<Tls> tls,
                                            Relay relay) {
  std::shared_ptr<Connector> made(
      new Connector(context, timeout, std::move(done), std::move(tls), std::move(relay)));
  made->begin(address);
  return made;
}

void Connector::arm_deadline() {
  deadline_.expires_after(timeout_);
  deadline_.async_wait([self = shared_from_this()](const asio::error_code& error) {
    if (!error) self->finish(self->failure_.empty() ? "no answer" : self->failure_);
  });
}

void Connector::begin(const wire::Address& address) {
  auto self = shared_from_this();
  arm_deadline();
  if (const auto numeric = numeric_endpoint(address)) {
    endpoints_.push_back(*numeric);
    asio::post(context_, [self] { self->try_next(); });
    return;
  }
  auto resolver = std::make_shared<asio::ip::tcp::resolver>(context_);
  resolver->async_resolve(
      address.host, std::to_string(address.port), asio::ip::tcp::resolver::numeric_service,
      [self, resolver, host = address.host](const asio::error_code& error, const auto& results) {
        if (error) return self->finish("cannot resolve " + host + ": " + error.message());
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
  if (done_ && open_ == 0) finish(failure_.empty() ? "the host has no address" : failure_);
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
  // Registered anew: the loop reports a descriptor that has waited to be writable with every later
  // event.
  socket_ = std::make_unique<Socket>(context_, tried.socket->give());
  stagger_.cancel();
  attempts_.clear();
  if (answer_.empty()) return finish({});
  failure_ = "the other end did not connect to the relay in time";
  arm_deadline();
  write_request();
  read_answer();
}

void Connector::write_request() {
  if (!done_) return;
  const int result =
      request_.flush(*socket_, [self = shared_from_this()](const asio::error_code& error) {
        self->request_.resume();
        if (!error) self->write_request();
      });
  if (result != 0 && result != -EAGAIN) finish(error_text(-result));
}

void Connector::read_answer() {
  while (done_ && !answer_.empty()) {
    wire::Bytes bytes(answer_.size());
    const ssize_t got = socket_->read(bytes);
    if (got == -EAGAIN) {
      return socket_->wait_readable([self = shared_from_this()](const asio::error_code& error) {
        if (!error) self->read_answer();
      });
    }
    if (got <= 0) return finish("the master closed the connection");
    if (!std::equal(bytes.begin(), bytes.begin() + got, answer_.begin()))
      return finish("the master sent an unknown answer to the relay request");
    answer_.erase(answer_.begin(), answer_.begin() + got);
  }
  if (!done_) return;
  socket_ = std::make_unique<Socket>(context_, socket_->give());  // registered anew, as above
  finish({});
}

void Connector::finish(const std::string& failure) {
  if (!done_) return;
  Done done = std::exchange(done_, nullptr);
  std::unique_ptr<Socket> connection = failure.empty() ? std::move(socket_) : nullptr;
  cancel();
  if (connection == nullptr || tls_ == nullptr)
    return done(std::move(connection), {Code::unreachable, failure});
  handshake_ =
      TlsHandshake::start(context_, std::move(connection), std::move(tls_), {}, std::move(done));
}

void Connector::cancel() {
  done_ = nullptr;
  deadline_.cancel();
  stagger_.cancel();
  attempts_.clear();
  socket_.reset();
  if (handshake_) handshake_->cancel();
  handshake_.reset();
}

}  // namespace pccl::io
