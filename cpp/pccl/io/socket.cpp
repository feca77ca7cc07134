#include "pccl/io/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <system_error>

#include "pccl/base/fork.h"
#include "pccl/io/address.h"
#include "pccl/io/tls.h"
#include "pccl/os/socket.h"

namespace pccl::io {
namespace {

constexpr int kBacklog = 1024;
// Enough for the pauses between two turns of the loop: a millisecond at 1 Gbit/s.
constexpr int kUnsentBytes = 128 << 10;
constexpr int kKeepAliveSeconds = 15;
constexpr int kKeepAliveProbes = 8;

void set_option(int descriptor, int level, int option, int value) {
  (void)::setsockopt(descriptor, level, option, &value, sizeof value);
}

// Keeps NATs and firewalls from forgetting the connection, whatever the heartbeat interval is; many
// forget after half a minute of silence. Heartbeats end dead connections: they are quicker.
void keep_alive(int descriptor) {
  os::keep_alive(descriptor, kKeepAliveSeconds, kKeepAliveSeconds, kKeepAliveProbes);
}

int open_socket(int family) {
  return open_descriptor([&] { return os::open_stream(family); });
}

template <class Ask>
asio::ip::tcp::endpoint ask_endpoint(Ask ask) {
  asio::ip::tcp::endpoint endpoint;
  auto size = static_cast<socklen_t>(endpoint.capacity());
  if (ask(endpoint.data(), &size) != 0) return {};
  endpoint.resize(size);
  return endpoint;
}

}  // namespace

Socket::Socket(asio::io_context& context, int descriptor) : descriptor_(context), raw_(descriptor) {
  try {
    descriptor_.assign(descriptor);
  } catch (...) {
    close_descriptor(descriptor);
    throw;
  }
}

Result<std::unique_ptr<Socket>> Socket::make(asio::io_context& context, int descriptor) {
  try {
    return std::make_unique<Socket>(context, descriptor);
  } catch (const std::system_error& error) {
    return {Code::unreachable, error.code().message()};
  }
}

Socket::~Socket() { close(); }

void Socket::secure(std::unique_ptr<Tls> tls) { tls_ = std::move(tls); }

bool Socket::unsent() const { return tls_ != nullptr && tls_->unsent(); }

bool Socket::buffered() const { return tls_ != nullptr && tls_->buffered(); }

void Socket::close() {
  if (raw_ < 0) return;
  // Off the loop first, then closed in a way that is safe with forks.
  descriptor_.release();
  close_descriptor(std::exchange(raw_, -1));
}

int Socket::give() {
  descriptor_.release();
  return std::exchange(raw_, -1);
}

void Socket::hold_little() const {
#ifdef TCP_NOTSENT_LOWAT
  set_option(raw_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kUnsentBytes);
#endif
}

void Socket::try_again_evenly() const {
#ifdef TCP_THIN_LINEAR_TIMEOUTS
  set_option(raw_, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1);
#endif
}

ssize_t Socket::read(std::span<const iovec> into) const {
  return tls_ != nullptr ? tls_->read(raw_, into) : receive(raw_, into);
}

ssize_t Socket::write(std::span<const iovec> from) const {
  return tls_ != nullptr ? tls_->write(raw_, from) : transmit(raw_, from);
}

ssize_t Socket::read(std::span<std::uint8_t> into) const {
  const iovec part{into.data(), into.size()};
  return read({&part, 1});
}

ssize_t Socket::write(std::span<const std::uint8_t> from) const {
  const iovec part{const_cast<std::uint8_t*>(from.data()), from.size()};
  return write({&part, 1});
}

Begins begins_with(int descriptor, std::span<const std::uint8_t> bytes) {
  std::vector<std::uint8_t> first(bytes.size());
  const ssize_t got = ::recv(descriptor, first.data(), first.size(), MSG_PEEK | MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Begins::not_yet;
  const bool same = got > 0 && std::equal(first.begin(), first.begin() + got, bytes.begin());
  const bool all = got == static_cast<ssize_t>(bytes.size());
  // Otherwise a client that sends one byte and waits would keep the socket readable.
  set_option(descriptor, SOL_SOCKET, SO_RCVLOWAT,
             same && !all ? static_cast<int>(bytes.size()) : 1);
  if (same && !all) return Begins::perhaps;
  return same ? Begins::yes : Begins::no;
}

ssize_t receive(int descriptor, std::span<const iovec> into) {
  for (;;) {
    const ssize_t got = ::readv(descriptor, into.data(), static_cast<int>(into.size()));
    if (got >= 0) return got;
    if (errno != EINTR) return -errno;
  }
}

ssize_t transmit(int descriptor, std::span<const iovec> from) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(from.data());
  message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(from.size());
  for (;;) {
    const ssize_t put = ::sendmsg(descriptor, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put >= 0) return put;
    if (errno != EINTR) return -errno;
  }
}

asio::ip::tcp::endpoint Socket::local() const {
  return ask_endpoint([&](sockaddr* to, socklen_t* size) { return ::getsockname(raw_, to, size); });
}

asio::ip::tcp::endpoint Socket::remote() const {
  return ask_endpoint([&](sockaddr* to, socklen_t* size) { return ::getpeername(raw_, to, size); });
}

Result<int> listen_on(const asio::ip::tcp::endpoint& endpoint) {
  const auto fail = [&](int number) {
    return Result<int>(Code::invalid_usage,
                       "cannot listen on " + to_string(endpoint) + ": " + error_text(number));
  };
  const int descriptor = open_socket(endpoint.protocol().family());
  if (descriptor < 0) return fail(errno);
  set_option(descriptor, SOL_SOCKET, SO_REUSEADDR, 1);
  if (endpoint.address().is_v6()) {
    set_option(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, endpoint.address().is_unspecified() ? 0 : 1);
  }
  if (::bind(descriptor, endpoint.data(), static_cast<socklen_t>(endpoint.size())) != 0 ||
      ::listen(descriptor, kBacklog) != 0) {
    const int number = errno;
    close_descriptor(descriptor);
    return fail(number);
  }
  return descriptor;
}

Result<int> listen_at(const wire::Address& address) {
  if (address.host.empty()) {
    auto both = listen_on({asio::ip::address_v6::any(), address.port});
    if (both) return both;
    return listen_on({asio::ip::address_v4::any(), address.port});
  }
  if (const auto numeric = numeric_endpoint(address)) return listen_on(*numeric);
  const auto fail = [&](const std::string& why) {
    return Result<int>(Code::invalid_argument, "cannot listen on " + address.host + ": " + why);
  };
  asio::io_context context;
  asio::ip::tcp::resolver resolver(context);
  asio::error_code error;
  const auto found = resolver.resolve(address.host, std::to_string(address.port), error);
  if (error) return fail(error.message());
  Result<int> listener = fail("it has no address");
  for (const auto& candidate : found) {
    listener = listen_on(candidate.endpoint());
    if (listener) break;
  }
  return listener;
}

int accept_on(const Socket& listener) {
  for (;;) {
    const int descriptor = open_descriptor([&] { return os::accept_stream(listener.raw()); });
    if (descriptor >= 0) {
      set_option(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
      keep_alive(descriptor);
      return descriptor;
    }
    const int error = errno;
    if (error == EINTR || error == ECONNABORTED) continue;
    // The error for no free descriptor also comes when no connection waits.
    pollfd waiting{listener.raw(), POLLIN, 0};
    const bool nobody = (error == EMFILE || error == ENFILE) && ::poll(&waiting, 1, 0) == 0;
    return nobody ? -EAGAIN : -error;
  }
}

int connect_to(const asio::ip::tcp::endpoint& endpoint) {
  const int descriptor = open_socket(endpoint.protocol().family());
  if (descriptor < 0) return -errno;
  set_option(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
  keep_alive(descriptor);
  if (::connect(descriptor, endpoint.data(), static_cast<socklen_t>(endpoint.size())) == 0 ||
      errno == EINPROGRESS || errno == EINTR) {
    return descriptor;
  }
  const int number = errno;
  close_descriptor(descriptor);
  return -number;
}

int connect_error(int descriptor) {
  int number = 0;
  socklen_t size = sizeof number;
  if (::getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &number, &size) != 0) return errno;
  return number;
}

std::string error_text(int error_number) { return std::generic_category().message(error_number); }

}  // namespace pccl::io
