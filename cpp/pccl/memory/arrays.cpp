#include "pccl/memory/arrays.h"

#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "pccl/base/fork.h"
#include "pccl/os/shared_memory.h"

namespace pccl::memory {
namespace {

constexpr std::size_t kAlignment = 64;
// Small arrays share a chunk: descriptors and mappings are scarce.
constexpr std::size_t kSmall = std::size_t{256} << 10;
constexpr std::size_t kChunk = std::size_t{4} << 20;

// All chunks, by address.
class Registry {
 public:
  Result<Place> make(std::size_t size) {
    const std::size_t bytes =
        (std::max<std::size_t>(size, 1) + kAlignment - 1) / kAlignment * kAlignment;
    const bool small = size <= kSmall;
    if (small) {
      const std::lock_guard lock(*mutex_);
      if (auto place = in_open_chunk(bytes)) return *std::move(place);
    }
    // Not under the lock: the system may take long to find the memory, and every operation asks
    // whether its arrays are here.
    auto made = make_memory(small ? kChunk : bytes);
    if (!made) return made.error();
    const std::lock_guard lock(*mutex_);
    if (!small) return Place{add(*std::move(made)), 0};
    // Another thread may have made a chunk meanwhile.
    if (auto place = in_open_chunk(bytes)) return *std::move(place);
    ChunkPtr chunk = add(*std::move(made));
    open_ = chunk;
    used_ = bytes;
    return Place{std::move(chunk), 0};
  }

  std::optional<Place> find(const void* data, std::size_t size) {
    if (count_.load(std::memory_order_relaxed) == 0) return std::nullopt;
    const auto at = reinterpret_cast<std::uintptr_t>(data);
    const std::lock_guard lock(*mutex_);
    auto it = chunks_.upper_bound(at);
    if (it == chunks_.begin()) return std::nullopt;
    --it;
    ChunkPtr chunk = it->second.lock();
    if (chunk == nullptr || !ours(*chunk)) return std::nullopt;
    const std::uint64_t offset = at - it->first;
    if (offset > chunk->region->size() || size > chunk->region->size() - offset)
      return std::nullopt;
    return Place{std::move(chunk), offset};
  }

  // Held during a fork, so that the child's copy is consistent.
  void lock() { mutex_->lock(); }
  void unlock() { mutex_->unlock(); }
  // For the child of a fork. Its thread does not own the locked mutex, which is therefore leaked.
  void renew() {
    (void)mutex_.release();
    mutex_ = std::make_unique<std::recursive_mutex>();
  }

 private:
  // Not if the chunk is from before a fork.
  static bool ours(const Chunk& chunk) { return chunk.region->made_here(); }

  // A place in the chunk that small arrays share. Empty: it has no room. REQUIRES: the lock.
  std::optional<Place> in_open_chunk(std::size_t bytes) {
    ChunkPtr chunk = open_.lock();
    // Never continue a chunk from before a fork: parent and child would use the same bytes.
    if (chunk == nullptr || !ours(*chunk) || chunk->region->size() - used_ < bytes)
      return std::nullopt;
    Place place{std::move(chunk), used_};
    used_ += bytes;
    return place;
  }

  // The memory of a new chunk.
  Result<RegionPtr> make_memory(std::size_t size) {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 &&
        count_.load(std::memory_order_relaxed) >= static_cast<std::size_t>(limit.rlim_cur) / 4)
      return Error{Code::internal_error, "too many descriptors for arrays"};
    auto made = make_region(size, Access::read);
    // This is the user's memory: forked children keep it, like all other memory.
    if (made) os::give_to_children((*made)->data(), (*made)->size());
    return made;
  }

  // REQUIRES: the lock.
  ChunkPtr add(RegionPtr region) {
    const auto at = reinterpret_cast<std::uintptr_t>(region->data());
    // Forget the chunk before it is unmapped: its addresses may be reused at once.
    ChunkPtr chunk(new Chunk{std::move(region), ++numbers_}, [this, at](const Chunk* dropped) {
      {
        const std::lock_guard lock(*mutex_);
        chunks_.erase(at);
        count_.store(chunks_.size(), std::memory_order_relaxed);
      }
      delete dropped;
    });
    chunks_[at] = chunk;
    count_.store(chunks_.size(), std::memory_order_relaxed);
    return chunk;
  }

  // Recursive: a look-up may drop the last reference to a chunk, whose deleter locks again.
  std::unique_ptr<std::recursive_mutex> mutex_ = std::make_unique<std::recursive_mutex>();
  std::map<std::uintptr_t, std::weak_ptr<const Chunk>> chunks_;
  std::atomic<std::size_t> count_ = 0;
  std::uint64_t numbers_ = 0;
  std::weak_ptr<const Chunk> open_;  // the chunk with room for small arrays
  std::size_t used_ = 0;
};

// Never destroyed: arrays may outlive everything else.
Registry& registry() {
  static Registry& all = *[] {
    // Registers the fork handlers of base/fork.h first. Those that run before a fork run in reverse
    // order, so the registry is locked first.
    (void)fork_generation();
    auto* const made = new Registry;
    pthread_atfork([] { registry().lock(); }, [] { registry().unlock(); },
                   [] { registry().renew(); });
    return made;
  }();
  return all;
}

}  // namespace

Result<Place> make_array(std::size_t size) { return registry().make(size); }

std::optional<Place> find_array(const void* data, std::size_t size) {
  return registry().find(data, size);
}

}  // namespace pccl::memory
