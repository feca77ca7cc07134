#include "pccl/base/buffer.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>

namespace pccl {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kSmallest = 4096;
constexpr std::size_t kMiB = 1 << 20;
// Large blocks may come in huge pages: to touch new ones takes as long as to copy.
constexpr std::size_t kLarge = 4 * kMiB;
constexpr std::size_t kLargeUnit = 2 * kMiB;

}  // namespace

Buffer::~Buffer() {
  if (data_ != nullptr) pool_->give_back({data_, capacity_});
}

BufferPool::~BufferPool() {
  for (const Block& block : free_) free(block);
}

Buffer BufferPool::take(std::size_t size) {
  // Powers of two up to 1 MiB, then multiples of 1 or 2 MiB: blocks can be reused, and a large one
  // wastes little.
  const std::size_t unit = size < kLarge ? kMiB : kLargeUnit;
  const std::size_t capacity =
      size <= kMiB ? std::bit_ceil(std::max(size, kSmallest)) : (size + unit - 1) / unit * unit;
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
  if (buffer.data_ == nullptr) buffer.data_ = allocate(capacity);
  buffer.size_ = size;
  buffer.capacity_ = capacity;
  buffer.pool_ = shared_from_this();
  return buffer;
}

std::uint8_t* BufferPool::allocate(std::size_t capacity) const {
  void* const data =
      in_pages(capacity) ? pages_.map(capacity) : std::aligned_alloc(kAlignment, capacity);
  if (data == nullptr) throw std::bad_alloc();
  return static_cast<std::uint8_t*>(data);
}

void BufferPool::free(const Block& block) const {
  if (in_pages(block.capacity)) {
    pages_.unmap(block.data, block.capacity);
  } else {
    std::free(block.data);
  }
}

bool BufferPool::in_pages(std::size_t capacity) const {
  return pages_.map != nullptr && capacity >= kLarge;
}

void BufferPool::give_back(Block block) {
  if (block.capacity > keep_bytes_) return free(block);
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
  for (const Block& each : dropped) free(each);
}

std::size_t BufferPool::kept_bytes() {
  const std::lock_guard lock(mutex_);
  return kept_;
}

}  // namespace pccl
