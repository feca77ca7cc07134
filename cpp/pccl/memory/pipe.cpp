#include "pccl/memory/pipe.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "pccl/base/copy.h"

namespace pccl::memory {
namespace {

// Copies `bytes` between a list of pieces and a ring, from position `at` of the ring on.
template <class Copy>
void walk(std::span<const iovec> parts, std::uint64_t at, std::size_t bytes, Copy copy_piece) {
  for (const iovec& part : parts) {
    auto* piece = static_cast<std::uint8_t*>(part.iov_base);
    for (std::size_t left = std::min(part.iov_len, bytes); left > 0;) {
      const std::size_t offset = at % kPipeBytes;
      const std::size_t size = std::min(left, kPipeBytes - offset);
      copy_piece(piece, offset, size);
      piece += size;
      at += size;
      left -= size;
      bytes -= size;
    }
    if (bytes == 0) return;
  }
}

std::size_t total(std::span<const iovec> parts) {
  std::size_t bytes = 0;
  for (const iovec& part : parts) bytes += part.iov_len;
  return bytes;
}

}  // namespace

ssize_t Pipe::read(std::span<const iovec> into) {
  const std::uint64_t there = other().written.load(std::memory_order_acquire) - taken_;
  if (there > kPipeBytes) return -EPROTO;
  const std::size_t bytes = std::min<std::size_t>(there, total(into));
  if (bytes == 0) return -EAGAIN;
  walk(into, taken_, bytes, [&](std::uint8_t* piece, std::size_t offset, std::size_t size) {
    copy(piece, other().data + offset, size);
  });
  taken_ += bytes;
  own().taken.store(taken_, std::memory_order_release);
  return static_cast<ssize_t>(bytes);
}

ssize_t Pipe::write(std::span<const iovec> from) {
  const std::uint64_t under_way = written_ - other().taken.load(std::memory_order_acquire);
  if (under_way > kPipeBytes) return -EPROTO;
  const std::size_t bytes = std::min<std::size_t>(kPipeBytes - under_way, total(from));
  if (bytes == 0) return -EAGAIN;
  walk(from, written_, bytes, [&](const std::uint8_t* piece, std::size_t offset, std::size_t size) {
    copy(own().data + offset, piece, size);
  });
  written_ += bytes;
  own().written.store(written_, std::memory_order_release);
  return static_cast<ssize_t>(bytes);
}

bool Pipe::readable() const { return other().written.load(std::memory_order_acquire) != taken_; }

bool Pipe::writable() const {
  return written_ - other().taken.load(std::memory_order_acquire) < kPipeBytes;
}

bool Pipe::must_ring() {
  const bool wrote = std::exchange(announced_written_, written_) != written_;
  const bool took = std::exchange(announced_taken_, taken_) != taken_;
  if (!wrote && !took) return false;
  // Pairs with the fence of fall_asleep(). The other end sees what was moved before it falls
  // asleep, or this end sees that it sleeps.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const std::uint64_t sleep = other().sleeping.load(std::memory_order_relaxed);
  if ((sleep & 1U) == 0 || sleep == rung_ || (!wrote && (sleep & 2U) == 0)) return false;
  rung_ = sleep;
  return true;
}

bool Pipe::fall_asleep(bool wants_to_read, bool wants_to_write) {
  wake_up();
  std::atomic<std::uint64_t>& sleeping = own().sleeping;
  const std::uint64_t awake = sleeping.load(std::memory_order_relaxed);
  sleeping.store(awake + 1 + (wants_to_write ? 2 : 0), std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return !(wants_to_read && readable()) && !(wants_to_write && writable());
}

void Pipe::wake_up() {
  std::atomic<std::uint64_t>& sleeping = own().sleeping;
  const std::uint64_t sleep = sleeping.load(std::memory_order_relaxed);
  if ((sleep & 1U) != 0) sleeping.store((sleep | 3U) + 1, std::memory_order_relaxed);
}

}  // namespace pccl::memory
