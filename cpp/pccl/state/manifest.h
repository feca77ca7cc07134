// A state as hashes: entries, cut into chunks of 1 MiB, each with its XXH3-128. Pure functions on
// memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/state/memory.h"
#include "pccl/wire/records.h"

namespace pccl::state {

// The unit of comparing, moving and checking. No chunk spans two entries.
inline constexpr std::uint64_t kChunkBytes = 1 << 20;
inline constexpr std::size_t kMaxEntries = 1 << 16;
inline constexpr std::uint64_t kMaxChunks = 1 << 22;
inline constexpr std::size_t kMaxName = 1024;

// One entry of a member's own state.
struct LocalEntry {
  wire::StateEntry what;  // `content` and `tie` are filled by hash()
  const std::uint8_t* data = nullptr;
  std::uint8_t* writable = nullptr;  // where new bytes go after the sync; null: handed back instead
  Memory memory;  // where the caller's elements lie; REQUIRES: set where it is neither `writable`
                  // nor of nobody else
};

// All entries of a state with the hashes of their chunks, entry after entry.
struct Manifest {
  std::vector<wire::StateEntry> entries;  // sorted by name
  std::vector<wire::Digest> chunks;
  bool operator==(const Manifest&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.entries, self.chunks); }
};

// A member's state while it is in a sync: the memory it stands for does not change.
struct LocalState {
  std::vector<LocalEntry> entries;  // as in the manifest
  Manifest manifest;
  std::string flaw;  // why these entries cannot be shared; then nothing is hashed
};

[[nodiscard]] constexpr std::uint64_t chunk_count(std::uint64_t bytes) {
  return (bytes + kChunkBytes - 1) / kChunkBytes;
}

[[nodiscard]] wire::Digest digest(std::span<const std::uint8_t> bytes);

// Where chunk number `chunk` lies, counted over all entries.
struct ChunkPlace {
  std::uint32_t entry = 0;
  std::uint64_t offset = 0;  // bytes into the entry
  std::uint64_t bytes = 0;
};

// The chunks of a manifest's entries by number.
class ChunkIndex {
 public:
  explicit ChunkIndex(const std::vector<wire::StateEntry>& entries);
  [[nodiscard]] std::uint64_t count() const { return first_.back(); }
  [[nodiscard]] std::uint64_t first_of(std::size_t entry) const { return first_[entry]; }
  // REQUIRES: chunk < count().
  [[nodiscard]] ChunkPlace at(std::uint64_t chunk) const;

 private:
  std::vector<std::uint64_t> bytes_;  // by entry
  std::vector<std::uint64_t> first_;  // by entry, and the end
};

// Sorts the entries and hashes their memory with up to `threads` threads. `stop` is asked now and
// then from the calling thread; true: interrupted. An error is about this call's arguments alone;
// entries that overlap are a flaw, which the member tells the others.
[[nodiscard]] Result<std::shared_ptr<LocalState>> hash(std::vector<LocalEntry> entries,
                                                       unsigned threads,
                                                       const std::function<bool()>& stop);

// Fills the ties of entries that are the same memory. Returns why the state cannot be shared: two
// entries overlap otherwise, and one of them is written; empty: it can.
// REQUIRES: sorted by name.
[[nodiscard]] std::string find_ties(std::vector<LocalEntry>& entries);

// Of entries whose `content` is set.
[[nodiscard]] wire::Digest structure_of(const std::vector<wire::StateEntry>& entries);
[[nodiscard]] wire::Digest content_of(const std::vector<wire::StateEntry>& entries, bool loose);
// Of one entry, from the hashes of its chunks.
[[nodiscard]] wire::Digest entry_content(const wire::StateEntry& entry,
                                         std::span<const wire::Digest> chunks);

// Whether a manifest from elsewhere holds together, is the one with this content, and fits to our
// own entries: those of one name have one form, and one size if they are to be written in place.
[[nodiscard]] bool valid(const Manifest& manifest, const wire::Digest& content,
                         const std::vector<LocalEntry>& own);

// "float32[3,4]", "int"
[[nodiscard]] std::string describe(const wire::StateEntry& entry);

}  // namespace pccl::state
