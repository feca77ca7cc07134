// A TCP descriptor on an event loop. The loop only reports when it is readable or writable. The
// owner reads and writes, without blocking, so that no buffer is in use between two calls. Bytes
// may be encrypted on their way (tls.h).
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/posix/basic_stream_descriptor.hpp>
#include <asio/post.hpp>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "pccl/base/error.h"
#include "pccl/wire/records.h"

namespace pccl::io {

class Tls;

// All descriptors are non-blocking and close-on-exec, and forked children close them. A broken
// connection raises no signal. *one thread at a time: whoever drives the loop.* While that waits,
// one thread may read and another write, or one may do both if the connection is secured.
class Socket {
 public:
  // Takes the descriptor over.
  Socket(asio::io_context& context, int descriptor);
  // The same. An error, and not an exception, if the loop takes no more descriptors.
  [[nodiscard]] static Result<std::unique_ptr<Socket>> make(asio::io_context& context,
                                                            int descriptor);
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  [[nodiscard]] int raw() const { return raw_; }
  // Calls waiting handlers with an error. May be called again.
  void close();
  // Gives the descriptor to the caller. REQUIRES: not secured.
  [[nodiscard]] int give();

  // Encrypts all that follows. REQUIRES: the handshake of `tls` is over.
  void secure(std::unique_ptr<Tls> tls);
  [[nodiscard]] bool secured() const { return tls_ != nullptr; }

  // Calls `ready(error_code)` once.
  template <class Handler>
  void wait_readable(Handler&& ready) {
    if (buffered()) {
      asio::post(descriptor_.get_executor(), [handler = std::forward<Handler>(ready)]() mutable {
        handler(asio::error_code());
      });
      return;
    }
    descriptor_.async_wait(asio::posix::descriptor_base::wait_read, std::forward<Handler>(ready));
  }
  template <class Handler>
  void wait_writable(Handler&& ready) {
    descriptor_.async_wait(asio::posix::descriptor_base::wait_write, std::forward<Handler>(ready));
  }

  // Makes the socket writable only while the kernel holds few unsent bytes: bytes that the kernel
  // does not have may still go over another connection.
  void hold_little() const;

  // For a connection that carries little: TCP tries again several times before it doubles the time
  // between its tries.
  void try_again_evenly() const;

  // Bytes moved; 0 from read: the other end closed; negative: -errno (-EAGAIN: not now). A read
  // that leaves room has taken all bytes that had come.
  [[nodiscard]] ssize_t read(std::span<const iovec> into) const;
  [[nodiscard]] ssize_t read(std::span<std::uint8_t> into) const;
  [[nodiscard]] ssize_t write(std::span<const iovec> from) const;
  [[nodiscard]] ssize_t write(std::span<const std::uint8_t> from) const;
  // Some written bytes are not sent yet: write again, even nothing, when the socket is writable.
  [[nodiscard]] bool unsent() const;

  [[nodiscard]] asio::ip::tcp::endpoint local() const;
  [[nodiscard]] asio::ip::tcp::endpoint remote() const;

 private:
  [[nodiscard]] bool buffered() const;

  asio::posix::basic_stream_descriptor<asio::io_context::executor_type> descriptor_;
  int raw_;
  std::unique_ptr<Tls> tls_;  // null: nothing is encrypted
};

// Reads what has come, at most `reads` times, into `buffer`, and gives each part to `take`, which
// returns false to stop. -EAGAIN: the connection goes on; 0: the other end closed it; any other
// -errno: it is broken.
template <class Take>
[[nodiscard]] ssize_t read_available(const Socket& socket, std::span<std::uint8_t> buffer,
                                     int reads, const Take& take) {
  for (int i = 0; i < reads; ++i) {
    const ssize_t got = socket.read(buffer);
    if (got <= 0) return got;
    const auto bytes = static_cast<std::size_t>(got);
    if (!take(buffer.first(bytes)) || bytes < buffer.size()) break;
  }
  return -EAGAIN;
}

// Whether the connection begins with these bytes; does not consume them. `perhaps`: some have come,
// and they are equal; the socket is readable again when as many have come, or at its end.
enum class Begins : std::uint8_t { no, yes, perhaps, not_yet };
[[nodiscard]] Begins begins_with(int descriptor, std::span<const std::uint8_t> bytes);

// As read and write, of a bare descriptor.
[[nodiscard]] ssize_t receive(int descriptor, std::span<const iovec> into);
[[nodiscard]] ssize_t transmit(int descriptor, std::span<const iovec> from);

// A listening descriptor. At "::" it listens at all addresses, those of IPv4 included.
[[nodiscard]] Result<int> listen_on(const asio::ip::tcp::endpoint& endpoint);
// Without a host: on all interfaces, with IPv6 and IPv4 if the system can, else IPv4 alone. With a
// name: at its first address that belongs to this machine.
[[nodiscard]] Result<int> listen_at(const wire::Address& address);
// The next connection; negative: -errno.
[[nodiscard]] int accept_on(const Socket& listener);
// Begins to connect. The socket is writable when the attempt is over; connect_error tells its
// result. Negative: -errno.
[[nodiscard]] int connect_to(const asio::ip::tcp::endpoint& endpoint);
[[nodiscard]] int connect_error(int descriptor);

// "Connection refused"
[[nodiscard]] std::string error_text(int error_number);

}  // namespace pccl::io
