#include "pccl/io/connector.h"

#include <algorithm>
#include <asio/post.hpp>
#include <cerrno>
#include <utility>

#include "pccl/io/address.h"
#include "pccl/io/look_ups.h"
#include "pccl/io/tls.h"

namespace pccl::io {
namespace {

constexpr Duration kStagger = std::chrono::milliseconds(250);
constexpr std::size_t kMaxEndpoints = 16;

}  // namespace

Connector::Connector(asio::io_context& context, const Times& times, Done done,
                     std::unique_ptr<Tls> tls, Relay relay)
    : context_(context),
      times_(times),
      deadline_(context),
      stagger_(context),
      answer_(std::move(relay.answer)),
      done_(std::move(done)),
      tls_(std::move(tls)) {
  request_.append(relay.request);
}

std::shared_ptr<Connector> Connector::start(asio::io_context& context, const wire::Address& address,
                                            const Times& times, Done done, std::unique_ptr<Tls> tls,
                                            Relay relay) {
  std::shared_ptr<Connector> made(
      new Connector(context, times, std::move(done), std::move(tls), std::move(relay)));
  made->begin(address);
  return made;
}

void Connector::arm_deadline(Duration time) {
  deadline_.expires_after(time);
  deadline_.async_wait([self = shared_from_this()](const asio::error_code& error) {
    if (!error) self->finish(self->failure_.empty() ? "no answer" : self->failure_);
  });
}

void Connector::begin(const wire::Address& address) {
  auto self = shared_from_this();
  if (const auto numeric = numeric_endpoint(address)) {
    arm_deadline(times_.connect);
    endpoints_.push_back(*numeric);
    asio::post(context_, [self] { self->try_next(); });
    return;
  }
  const std::string failure = "cannot resolve " + address.host + ": ";
  failure_ = failure + "no answer of a name server";
  arm_deadline(times_.look_up);
  look_up_ = LookUps::of(context_).start(address, [self, failure](const LookUps::Answer& answer) {
    if (!self->done_) return;
    if (!answer.failure.empty()) return self->finish(failure + answer.failure);
    self->failure_.clear();
    self->endpoints_ = answer.endpoints;
    if (self->endpoints_.size() > kMaxEndpoints) self->endpoints_.resize(kMaxEndpoints);
    self->arm_deadline(self->times_.connect);
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
    auto socket = Socket::make(context_, descriptor);
    if (!socket) {
      failure_ = to_string(endpoint) + ": " + socket.error().reason;
      continue;
    }
    const std::size_t attempt = attempts_.size();
    attempts_.push_back({endpoint, std::move(*socket)});
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
  std::string why;
  if (const int number = connect_error(tried.socket->raw()); number != 0) {
    why = error_text(number);
  } else if (auto socket = again(*tried.socket); socket) {
    socket_ = std::move(*socket);
  } else {
    why = socket.error().reason;
  }
  if (!why.empty()) {
    failure_ = to_string(tried.to) + ": " + why;
    tried.socket.reset();
    --open_;
    return try_next();
  }
  stagger_.cancel();
  attempts_.clear();
  if (answer_.empty()) return finish({});
  failure_ = "the other end did not connect to the relay in time";
  arm_deadline(times_.connect);
  write_request();
  read_answer();
}

// Registers the socket anew: the loop reports a descriptor that has waited to be writable with
// every later event.
Result<std::unique_ptr<Socket>> Connector::again(Socket& socket) {
  return Socket::make(context_, socket.give());
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
  auto socket = again(*socket_);
  if (!socket) return finish(socket.error().reason);
  socket_ = std::move(*socket);
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
  if (look_up_ != 0) LookUps::of(context_).cancel(look_up_);
  attempts_.clear();
  socket_.reset();
  if (handshake_) handshake_->cancel();
  handshake_.reset();
}

}  // namespace pccl::io
