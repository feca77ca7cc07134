#include "pccl/base/buffer.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>

namespace pccl {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kSmallest = 4096;

}  // namespace

Buffer::~Buffer() {
  if (data_ != nullptr) pool_->give_back({data_, capacity_});
}

BufferPool::~BufferPool() {
  for (const Block& block : free_) std::free(block.data);
}

Buffer BufferPool::take(std::size_t size) {
  // Powers of two up to 1 MiB, then multiples of 1 MiB: blocks can be reused, and a large one
  // wastes little.
  constexpr std::size_t kMiB = 1 << 20;
  const std::size_t capacity =
      size <= kMiB ? std::bit_ceil(std::max(size, kSmallest)) : (size + kMiB - 1) / kMiB * kMiB;
  Buffer buffer;
  {
    const std::lock_guard lock(mutex_);
    // Newest first: most likely still in a cache.
    const auto found = std::find_if(free_.rbegin(), free_.rend(),
                                    [&](const Block& block) { return block.capacity == capacity; });
    if (found != free_.rend()) {
      buffer.data_ = found->data;
      kept_ -= capacity;
      free_.erase(std::next(found).base());
    }
  }
  if (buffer.data_ == nullptr) {
    buffer.data_ = static_cast<std::uint8_t*>(std::aligned_alloc(kAlignment, capacity));
    if (buffer.data_ == nullptr) throw std::bad_alloc();
  }
  buffer.size_ = size;
  buffer.capacity_ = capacity;
  buffer.pool_ = shared_from_this();
  return buffer;
}

void BufferPool::give_back(Block block) {
  if (block.capacity > keep_bytes_) {
    std::free(block.data);
    return;
  }
  std::vector<Block> dropped;
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(block);
    kept_ += block.capacity;
    // Oldest first: nobody has asked for its size since.
    auto oldest = free_.begin();
    for (; kept_ > keep_bytes_; ++oldest) kept_ -= oldest->capacity;
    dropped.assign(free_.begin(), oldest);
    free_.erase(free_.begin(), oldest);
  }
  for (const Block& each : dropped) std::free(each.data);
}

std::size_t BufferPool::kept_bytes() {
  const std::lock_guard lock(mutex_);
  return kept_;
}

}  // namespace pccl
