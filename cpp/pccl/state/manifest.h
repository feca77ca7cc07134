// The hashes of a state: its entries are cut into chunks of 1 MiB, each with its XXH3-128. Pure
// functions on memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/base/parallel.h"
#include "pccl/state/memory.h"
#include "pccl/wire/records.h"

namespace pccl::state {

// Chunks are compared, transferred and verified as a whole. No chunk spans two entries.
inline constexpr std::uint64_t kChunkBytes = 1 << 20;
inline constexpr std::size_t kMaxEntries = 1 << 16;
inline constexpr std::uint64_t kMaxChunks = 1 << 22;
inline constexpr std::size_t kMaxName = 1024;

// One entry of a member's own state.
struct LocalEntry {
  wire::StateEntry what;  // `content` and `tie` are filled by hash()
  const std::uint8_t* data = nullptr;
  std::uint8_t* writable = nullptr;  // new bytes are written here; null: returned to the caller
  // The layout of the caller's elements. REQUIRES: set, unless it is `writable` or private memory.
  Memory memory;
  bool overwritten = false;  // a part was, in this sync or in one before that has failed
};

// All entries of a state with the hashes of their chunks, entry after entry.
struct Manifest {
  std::vector<wire::StateEntry> entries;  // sorted by name
  std::vector<wire::Digest> chunks;
  static void fields(auto& self, auto& visit) { visit(self.entries, self.chunks); }
};

// A member's state during a sync. REQUIRES: its memory does not change, but by the sync itself.
struct LocalState {
  std::vector<LocalEntry> entries;  // as in the manifest
  // The hashes of the bytes that are in memory. That of a chunk that is being overwritten is zero.
  Manifest manifest;
  // Received bytes go straight to writable entries, and not beside them until the end.
  bool overwrite = false;
  bool mixed = false;  // a part was overwritten in this sync
  std::string flaw;    // why these entries cannot be shared; then nothing is hashed
};

[[nodiscard]] constexpr std::uint64_t chunk_count(std::uint64_t bytes) {
  return (bytes + kChunkBytes - 1) / kChunkBytes;
}

[[nodiscard]] wire::Digest digest(std::span<const std::uint8_t> bytes);
// Copies memory and returns the digest of what it has written, also if `from` changes meanwhile.
[[nodiscard]] wire::Digest copy_digest(std::uint8_t* to, const std::uint8_t* from,
                                       std::size_t bytes);

// The location of a chunk.
struct ChunkRange {
  std::uint32_t entry = 0;
  std::uint64_t offset = 0;  // bytes into the entry
  std::uint64_t bytes = 0;
};

// The chunks of a manifest's entries, numbered over all entries.
class ChunkIndex {
 public:
  explicit ChunkIndex(const std::vector<wire::StateEntry>& entries);
  [[nodiscard]] std::uint64_t count() const { return first_.back(); }
  [[nodiscard]] std::uint64_t first_of(std::size_t entry) const { return first_[entry]; }
  // REQUIRES: chunk < count().
  [[nodiscard]] ChunkRange at(std::uint64_t chunk) const;

 private:
  std::vector<std::uint64_t> bytes_;  // by entry
  std::vector<std::uint64_t> first_;  // by entry, and the end
};

// Sorts the entries and hashes their memory, in parallel. The calling thread polls `stop`; true:
// interrupted. invalid_argument: the entries break a limit, or two have one name.
// Entries that overlap are a flaw, which the member reports to the others.
[[nodiscard]] Result<std::shared_ptr<LocalState>> hash(std::vector<LocalEntry> entries,
                                                       Parallel& parallel,
                                                       const std::function<bool()>& stop);

// Fills the ties of entries that are the same memory. Returns why the state cannot be shared: two
// entries overlap in another way, and one of them is written. Empty: it can be shared. REQUIRES:
// sorted by name. Polls `stop`; nullopt: it was true.
[[nodiscard]] std::optional<std::string> find_ties(std::vector<LocalEntry>& entries,
                                                   const std::function<bool()>& stop);

// The hashes of a vote. `loose`: hashes the loose entries, otherwise the others. REQUIRES:
// `content` is set.
[[nodiscard]] wire::Digest structure_of(const std::vector<wire::StateEntry>& entries);
[[nodiscard]] wire::Digest content_of(const std::vector<wire::StateEntry>& entries, bool loose);
// Whether kind, shape, looseness and tie are equal.
[[nodiscard]] bool same_form(const wire::StateEntry& a, const wire::StateEntry& b);
// The content of one entry, from the hashes of its chunks.
[[nodiscard]] wire::Digest entry_content(const wire::StateEntry& entry,
                                         std::span<const wire::Digest> chunks);

// Hashes the chunks whose hash is zero, and fills the contents.
void hash_unknown(LocalState& state);

// Fills the contents of the entries from the hashes of their chunks. An entry has the hashes of the
// one that it is tied to.
void fill_contents(LocalState& state, const ChunkIndex& index);

// Whether a received manifest is consistent, has this content, and matches our own entries: entries
// with the same name have the same form, and the same size if ours is written in place.
[[nodiscard]] bool valid(const Manifest& manifest, const wire::Digest& content,
                         const std::vector<LocalEntry>& own);

// "float32[3,4]", "int"
[[nodiscard]] std::string describe(const wire::StateEntry& entry);

}  // namespace pccl::state
