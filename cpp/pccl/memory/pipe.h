// A byte stream each way between two peers of one host, through shared memory. Each end has a ring
// that only it writes. Pipes are read and written like non-blocking sockets.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "pccl/memory/region.h"

namespace pccl::memory {

// Large enough that each end has something to do while the other is busy; half of a usual cache.
inline constexpr std::size_t kPipeBytes = std::size_t{1} << 20;

// The memory of one end. The other end only reads it.
struct PipeEnd {
  alignas(64) std::atomic<std::uint64_t> written;  // bytes, to `data`, since the start
  alignas(64) std::atomic<std::uint64_t> taken;    // bytes, from the other end's `data`
  // The number of its sleeps, times four. Bit 0: it sleeps, and wants to be rung when there is
  // something to read. Bit 1: also when there is room to write.
  alignas(64) std::atomic<std::uint64_t> sleeping;
  alignas(4096) std::uint8_t data[kPipeBytes];
};
inline constexpr std::size_t kPipeEndBytes = sizeof(PipeEnd);

// *one thread at a time: whoever drives the loop*
class Pipe {
 public:
  // REQUIRES: both hold a PipeEnd; `own` is zeroed.
  Pipe(RegionPtr own, RegionPtr other) : own_(std::move(own)), other_(std::move(other)) {}

  // Return the bytes moved, or -errno. -EAGAIN: nothing can be moved now. -EPROTO: the other end's
  // counts are impossible.
  [[nodiscard]] ssize_t read(std::span<const iovec> into);
  [[nodiscard]] ssize_t write(std::span<const iovec> from);

  [[nodiscard]] bool readable() const;
  [[nodiscard]] bool writable() const;
  [[nodiscard]] std::uint64_t moved() const { return written_ + taken_; }  // bytes, both ways
  // Whether the other end sleeps for something that this end has moved since the last call. True
  // once for each of its sleeps.
  [[nodiscard]] bool must_ring();
  // Call before polling stops: the other end rings from now on. False: there is something to do.
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
  std::uint64_t rung_ = 0;  // the other end's sleep that was rung last
  // written_ and taken_ at the last must_ring().
  std::uint64_t announced_written_ = 0;
  std::uint64_t announced_taken_ = 0;
};

}  // namespace pccl::memory
