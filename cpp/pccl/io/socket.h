// A TCP descriptor on an event loop. The loop only says when it may be read or written; the reading
// and writing is done by the owner, without blocking, so that no buffer is referenced between two
// calls. What is read and written may be encrypted on its way (tls.h).
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/posix/basic_stream_descriptor.hpp>
#include <asio/post.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "pccl/base/error.h"
#include "pccl/wire/records.h"

namespace pccl::io {

class Tls;

// All descriptors are non-blocking, close-on-exec and not kept by forked children; a broken
// connection raises no signal. *one thread at a time: whoever drives the loop*
class Socket {
 public:
  // Takes the descriptor over.
  Socket(asio::io_context& context, int descriptor);
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  [[nodiscard]] int raw() const { return raw_; }
  [[nodiscard]] bool is_open() const { return raw_ >= 0; }
  // Handlers that wait are called with an error. May be called again.
  void close();
  // The descriptor is somebody else's now. REQUIRES: it is not secured.
  [[nodiscard]] int give();

  // From now on all goes through this. REQUIRES: its handshake is over.
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

  // To be writable only while little is on its way to the network: what is not handed over yet may
  // go on another connection.
  void hold_little() const;

  // Bytes moved; 0 from read: the other end closed; negative: -errno (-EAGAIN: not now). A read of
  // less than there was room for has taken all that had come.
  [[nodiscard]] ssize_t read(std::span<const iovec> into) const;
  [[nodiscard]] ssize_t write(std::span<const iovec> from) const;
  // Some of what was written is not on its way yet: write again, be it nothing, when writable.
  [[nodiscard]] bool unsent() const;

  [[nodiscard]] asio::ip::tcp::endpoint local() const;
  [[nodiscard]] asio::ip::tcp::endpoint remote() const;

 private:
  [[nodiscard]] bool buffered() const;

  asio::posix::basic_stream_descriptor<asio::io_context::executor_type> descriptor_;
  int raw_;
  std::unique_ptr<Tls> tls_;  // null: nothing is encrypted
};

// Whether the first bytes that come are these, without reading them. `perhaps`: as far as they have
// come; then it is not readable before there are as many, or it has ended.
enum class Begins : std::uint8_t { no, yes, perhaps, not_yet };
[[nodiscard]] Begins begins_with(int descriptor, std::span<const std::uint8_t> bytes);

// As read and write, of a bare descriptor.
[[nodiscard]] ssize_t receive(int descriptor, std::span<const iovec> into);
[[nodiscard]] ssize_t transmit(int descriptor, std::span<const iovec> from);

// A descriptor that listens, or why not. At "::": at all addresses, those of IPv4 included.
[[nodiscard]] Result<int> listen_on(const asio::ip::tcp::endpoint& endpoint);
// No host: on all interfaces, IPv6 and IPv4 at once where the system can, else IPv4. A name: at the
// first of its addresses that is this machine's.
[[nodiscard]] Result<int> listen_at(const wire::Address& address);
// The next connection; negative: -errno.
[[nodiscard]] int accept_on(const Socket& listener);
// Begins to connect; the socket is writable when that is over, and connect_error says how it went.
// Negative: -errno.
[[nodiscard]] int connect_to(const asio::ip::tcp::endpoint& endpoint);
[[nodiscard]] int connect_error(int descriptor);

// "Connection refused"
[[nodiscard]] std::string error_text(int error_number);

}  // namespace pccl::io
