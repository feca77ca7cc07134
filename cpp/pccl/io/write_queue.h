// Bytes that wait to be written to a socket.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "pccl/io/socket.h"
#include "pccl/wire/messages.h"

namespace pccl::io {

// *one thread at a time: whoever drives the loop*
class WriteQueue {
 public:
  // `kept`: bytes of memory that an empty queue may keep.
  explicit WriteQueue(std::size_t kept) : kept_(kept) {}
  WriteQueue() = default;

  void append(std::span<const std::uint8_t> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  [[nodiscard]] std::size_t size() const { return bytes_.size() - at_; }
  void clear();

  // Writes what the socket takes now. 0: everything is written. -EAGAIN: the rest waits until the
  // socket is writable; then `writable` is called, once, and must call resume(). Any other -errno:
  // the connection is broken, and the queue is empty.
  int flush(Socket& socket, std::function<void(const asio::error_code&)> writable);
  void resume() { waiting_ = false; }

 private:
  std::size_t kept_ = wire::kKeptBuffer;
  wire::Bytes bytes_;
  std::size_t at_ = 0;    // the first byte that is not written yet
  bool waiting_ = false;  // for the socket to be writable
};

}  // namespace pccl::io
