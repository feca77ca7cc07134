// Engine memory for bytes in flight: aligned blocks from a pool, so that a steady run allocates
// nothing and touches no fresh pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace pccl {

class BufferPool;

// One block, aligned to 64 bytes at least, returned to its pool on destruction.
// *one thread at a time*
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();
  [[nodiscard]] std::uint8_t* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  friend class BufferPool;
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    pool_.swap(other.pool_);
  }
  std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
  std::shared_ptr<BufferPool> pool_;
};

// For a block that another thread may still touch when its user is done with it.
using BufferPtr = std::shared_ptr<const Buffer>;

// Keeps the latest returned blocks for reuse, up to `keep_bytes` of them. *any thread*
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // The memory of blocks of 4 MiB and more, e.g. os::map_pages. `map`: aligned to 64 bytes, or
  // null.
  struct Pages {
    void* (*map)(std::size_t size) = nullptr;
    void (*unmap)(void* at, std::size_t size) = nullptr;
  };
  explicit BufferPool(std::size_t keep_bytes) : keep_bytes_(keep_bytes) {}
  BufferPool(std::size_t keep_bytes, Pages pages) : keep_bytes_(keep_bytes), pages_(pages) {}
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  // Uninitialised memory of `size` bytes. Throws std::bad_alloc.
  [[nodiscard]] Buffer take(std::size_t size);
  [[nodiscard]] std::size_t kept_bytes();

 private:
  friend class Buffer;
  struct Block {
    std::uint8_t* data;
    std::size_t capacity;
  };
  void give_back(Block block);
  [[nodiscard]] bool in_pages(std::size_t capacity) const;
  [[nodiscard]] std::uint8_t* allocate(std::size_t capacity) const;
  void free(const Block& block) const;
  std::mutex mutex_;
  std::size_t keep_bytes_;
  Pages pages_;
  std::size_t kept_ = 0;
  std::vector<Block> free_;
};

}  // namespace pccl
