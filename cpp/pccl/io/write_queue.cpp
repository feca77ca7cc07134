#include "pccl/io/write_queue.h"

#include <cerrno>
#include <utility>

namespace pccl::io {

void WriteQueue::clear() {
  bytes_.clear();
  if (bytes_.capacity() > kept_) wire::Bytes().swap(bytes_);
  at_ = 0;
}

int WriteQueue::flush(Socket& socket, std::function<void(const asio::error_code&)> writable) {
  if (waiting_) return -EAGAIN;
  ssize_t put = 0;
  while (size() > 0 || socket.unsent()) {
    put = socket.write(std::span(bytes_).subspan(at_));
    if (put < 0) break;
    at_ += static_cast<std::size_t>(put);
  }
  if (put != -EAGAIN) {
    clear();
    return put < 0 ? static_cast<int>(put) : 0;
  }
  if (at_ > bytes_.size() / 2) {
    bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(at_));
    at_ = 0;
  }
  waiting_ = true;
  socket.wait_writable(std::move(writable));
  return -EAGAIN;
}

}  // namespace pccl::io
