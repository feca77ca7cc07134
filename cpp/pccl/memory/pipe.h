// A stream of bytes each way between two peers of one host, through memory: a ring in the memory of
// each, which it alone writes. Read and written like a socket that never blocks.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "pccl/memory/region.h"

namespace pccl::memory {

// Enough that both ends find something to do while the other is busy, and half of a usual cache.
inline constexpr std::size_t kPipeBytes = std::size_t{1} << 20;

// What one end writes, and the other only reads.
struct PipeEnd {
  alignas(64) std::atomic<std::uint64_t> written;  // bytes of `data`, since the beginning
  alignas(64) std::atomic<std::uint64_t> taken;    // ... of the other end's
  // How often it slept, times four; plus 1: it sleeps, and wants to be rung when there is something
  // to read; plus 2: also when there is room.
  alignas(64) std::atomic<std::uint64_t> sleeping;
  alignas(4096) std::uint8_t data[kPipeBytes];
};
inline constexpr std::size_t kPipeEndBytes = sizeof(PipeEnd);

// *one thread at a time: whoever drives the loop*
class Pipe {
 public:
  // REQUIRES: both hold a PipeEnd; `own` is zeroed.
  Pipe(RegionPtr own, RegionPtr other) : own_(std::move(own)), other_(std::move(other)) {}

  // Bytes moved; negative: -errno (-EAGAIN: not now; -EPROTO: the other end's numbers are wild).
  [[nodiscard]] ssize_t read(std::span<const iovec> into);
  [[nodiscard]] ssize_t write(std::span<const iovec> from);

  [[nodiscard]] bool readable() const;
  [[nodiscard]] bool writable() const;
  [[nodiscard]] std::uint64_t moved() const { return written_ + taken_; }  // bytes, both ways
  // Something was moved that the other end sleeps for; once for each of its sleeps.
  [[nodiscard]] bool must_ring();
  // Before its user stops looking: the other end rings from now on. False: there is something to
  // do.
  [[nodiscard]] bool fall_asleep(bool wants_to_read, bool wants_to_write);
  void wake_up();

 private:
  [[nodiscard]] PipeEnd& own() const { return *reinterpret_cast<PipeEnd*>(own_->data()); }
  [[nodiscard]] const PipeEnd& other() const {
    return *reinterpret_cast<const PipeEnd*>(other_->data());
  }

  RegionPtr own_;
  RegionPtr other_;
  std::uint64_t written_ = 0;
  std::uint64_t taken_ = 0;
  std::uint64_t rung_ = 0;  // the sleep in which we rang last
  // Of written_ and taken_, at the latest must_ring().
  std::uint64_t told_written_ = 0;
  std::uint64_t told_taken_ = 0;
};

}  // namespace pccl::memory
