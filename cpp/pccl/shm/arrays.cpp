#include "pccl/shm/arrays.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

namespace pccl::shm {
namespace {

constexpr std::size_t kAlignment = 64;
// Small arrays share a chunk: descriptors and mappings are scarce.
constexpr std::size_t kSmall = std::size_t{256} << 10;
constexpr std::size_t kChunk = std::size_t{4} << 20;

// All chunks, by address.
class Registry {
 public:
  Result<Place> make(std::size_t size) {
    const std::size_t room = (std::max<std::size_t>(size, 1) + kAlignment - 1) / kAlignment;
    const std::lock_guard lock(mutex_);
    if (size > kSmall) {
      auto made = add(room * kAlignment);
      if (!made) return made.error();
      return Place{*made, 0};
    }
    ChunkPtr chunk = open_.lock();
    if (chunk == nullptr || chunk->region->size() - used_ < room * kAlignment) {
      auto made = add(kChunk);
      if (!made) return made.error();
      chunk = *made;
      open_ = chunk;
      used_ = 0;
    }
    Place place{chunk, used_};
    used_ += room * kAlignment;
    return place;
  }

  std::optional<Place> find(const void* data, std::size_t size) {
    if (count_.load(std::memory_order_relaxed) == 0) return std::nullopt;
    const auto at = reinterpret_cast<std::uintptr_t>(data);
    const std::lock_guard lock(mutex_);
    auto it = chunks_.upper_bound(at);
    if (it == chunks_.begin()) return std::nullopt;
    --it;
    ChunkPtr chunk = it->second.lock();
    if (chunk == nullptr) return std::nullopt;
    const std::uint64_t offset = at - it->first;
    if (offset > chunk->region->size() || size > chunk->region->size() - offset)
      return std::nullopt;
    return Place{std::move(chunk), offset};
  }

 private:
  Result<ChunkPtr> add(std::size_t size) {
    auto made = make_region(size, Access::read);
    if (!made) return made.error();
    // The user's own memory, which forked children go on seeing as any other.
    (void)::madvise((*made)->data(), (*made)->size(), MADV_DOFORK);
    const auto at = reinterpret_cast<std::uintptr_t>((*made)->data());
    // Its addresses may be used again as soon as it is unmapped, so it is forgotten before.
    ChunkPtr chunk(new Chunk{std::move(*made), ++numbers_}, [this, at](const Chunk* dropped) {
      {
        const std::lock_guard lock(mutex_);
        chunks_.erase(at);
        count_.store(chunks_.size(), std::memory_order_relaxed);
      }
      delete dropped;
    });
    chunks_[at] = chunk;
    count_.store(chunks_.size(), std::memory_order_relaxed);
    return chunk;
  }

  // Recursive: the last holder of a chunk may be somebody who looks for one.
  std::recursive_mutex mutex_;
  std::map<std::uintptr_t, std::weak_ptr<const Chunk>> chunks_;
  std::atomic<std::size_t> count_ = 0;
  std::uint64_t numbers_ = 0;
  std::weak_ptr<const Chunk> open_;  // with room for small ones
  std::size_t used_ = 0;
};

// Never destroyed: arrays may outlive everything else.
Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

}  // namespace

Result<Place> make_array(std::size_t size) { return registry().make(size); }

std::optional<Place> find_array(const void* data, std::size_t size) {
  return registry().find(data, size);
}

}  // namespace pccl::shm
