#include "pccl/state/manifest.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>

#include "pccl/digest/xxh3.h"

namespace pccl::state {
namespace {

// Chunks of one part of the work: it stops between parts.
constexpr std::uint64_t kBatch = 8;
// Pairs of entries to look at before it checks whether to stop.
constexpr std::size_t kLooks = 1 << 16;
// All entries must fit into one control message (wire::kMaxPayload).
constexpr std::size_t kMaxDescription = 15 << 20;
constexpr std::size_t kEntryOverhead = 64;

}  // namespace

wire::Digest digest(std::span<const std::uint8_t> bytes) {
  const digest::Hash128 hash = digest::xxh3_128(bytes);
  return {hash.low, hash.high};
}

wire::Digest copy_digest(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) {
  const digest::Hash128 hash = digest::copy_xxh3_128(to, from, bytes);
  return {hash.low, hash.high};
}

ChunkIndex::ChunkIndex(const std::vector<wire::StateEntry>& entries) {
  std::uint64_t next = 0;
  for (const wire::StateEntry& entry : entries) {
    bytes_.push_back(entry.bytes);
    first_.push_back(next);
    next += chunk_count(entry.bytes);
  }
  first_.push_back(next);
}

ChunkRange ChunkIndex::at(std::uint64_t chunk) const {
  // The last entry that begins at or before the chunk. An empty one begins where the next one does.
  const auto after = std::upper_bound(first_.begin(), first_.end(), chunk);
  const auto entry = static_cast<std::size_t>(after - first_.begin()) - 1;
  const std::uint64_t offset = (chunk - first_[entry]) * kChunkBytes;
  return {static_cast<std::uint32_t>(entry), offset, std::min(kChunkBytes, bytes_[entry] - offset)};
}

wire::Digest entry_content(const wire::StateEntry& entry, std::span<const wire::Digest> chunks) {
  wire::Bytes bytes;
  wire::Writer writer(bytes);
  writer(entry.bytes);
  for (const wire::Digest& chunk : chunks) writer(chunk);
  return digest(bytes);
}

wire::Digest structure_of(const std::vector<wire::StateEntry>& entries) {
  wire::Bytes bytes;
  wire::Writer writer(bytes);
  for (const wire::StateEntry& entry : entries)
    writer(entry.name, entry.kind, entry.shape, entry.loose, entry.tie);
  return digest(bytes);
}

wire::Digest content_of(const std::vector<wire::StateEntry>& entries, bool loose) {
  wire::Bytes bytes;
  wire::Writer writer(bytes);
  for (const wire::StateEntry& entry : entries) {
    if (entry.loose == loose) writer(entry.name, entry.content);
  }
  return digest(bytes);
}

void hash_unknown(LocalState& state) {
  const ChunkIndex index(state.manifest.entries);
  for (std::uint64_t chunk = 0; chunk < index.count(); ++chunk) {
    if (state.manifest.chunks[chunk] != wire::Digest{}) continue;
    const ChunkRange range = index.at(chunk);
    state.manifest.chunks[chunk] =
        digest({state.entries[range.entry].data + range.offset, range.bytes});
  }
  fill_contents(state, index);
}

void fill_contents(LocalState& state, const ChunkIndex& index) {
  Manifest& manifest = state.manifest;
  for (std::size_t e = 0; e < manifest.entries.size(); ++e) {
    wire::StateEntry& entry = manifest.entries[e];
    const auto hashes = std::span(manifest.chunks)
                            .subspan(index.first_of(e), index.first_of(e + 1) - index.first_of(e));
    if (!entry.tie.empty()) {
      const auto tie =
          std::ranges::lower_bound(manifest.entries, entry.tie, {}, &wire::StateEntry::name);
      const auto first = index.first_of(static_cast<std::size_t>(tie - manifest.entries.begin()));
      std::copy_n(manifest.chunks.begin() + static_cast<std::ptrdiff_t>(first), hashes.size(),
                  hashes.begin());
    }
    entry.content = entry_content(entry, hashes);
    state.entries[e].what.content = entry.content;
  }
}

bool same_form(const wire::StateEntry& a, const wire::StateEntry& b) {
  return a.kind == b.kind && a.shape == b.shape && a.loose == b.loose && a.tie == b.tie;
}

// Entries that are one memory have one content. The tie is the name of an earlier entry.
static bool same_content_as_tie(const Manifest& manifest, std::size_t i) {
  const wire::StateEntry& entry = manifest.entries[i];
  const auto end = manifest.entries.begin() + static_cast<std::ptrdiff_t>(i);
  const auto tie = std::lower_bound(
      manifest.entries.begin(), end, entry.tie,
      [](const wire::StateEntry& other, const std::string& name) { return other.name < name; });
  return tie != end && tie->name == entry.tie && tie->content == entry.content;
}

bool valid(const Manifest& manifest, const wire::Digest& content,
           const std::vector<LocalEntry>& own) {
  if (manifest.entries.size() > kMaxEntries || manifest.chunks.size() > kMaxChunks) return false;
  auto mine = own.begin();
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < manifest.entries.size(); ++i) {
    const wire::StateEntry& entry = manifest.entries[i];
    if (i > 0 && entry.name <= manifest.entries[i - 1].name) return false;
    if (entry.bytes > kMaxChunks * kChunkBytes) return false;  // prevents overflow below
    while (mine != own.end() && mine->what.name < entry.name) ++mine;
    if (mine != own.end() && mine->what.name == entry.name) {
      const wire::StateEntry& known = mine->what;
      if (!same_form(known, entry)) return false;
      if (mine->writable != nullptr && known.bytes != entry.bytes) return false;
      if (!entry.tie.empty() && !same_content_as_tie(manifest, i)) return false;
    }
    const std::uint64_t chunks = chunk_count(entry.bytes);
    if (chunks > manifest.chunks.size() - at) return false;
    const auto hashes = std::span(manifest.chunks).subspan(at, chunks);
    if (entry_content(entry, hashes) != entry.content) return false;
    at += chunks;
  }
  return at == manifest.chunks.size() && content_of(manifest.entries, false) == content;
}

std::string describe(const wire::StateEntry& entry) {
  if (entry.shape.empty()) return entry.kind;
  std::string text = entry.kind + "[";
  for (std::size_t i = 0; i < entry.shape.size(); ++i) {
    if (i > 0) text += ",";
    text += std::to_string(entry.shape[i]);
  }
  return text + "]";
}

std::optional<std::string> find_ties(std::vector<LocalEntry>& entries,
                                     const std::function<bool()>& stop) {
  // The first entry by name for each memory, kind and looseness.
  std::map<std::tuple<const Memory&, const std::string&, bool>, const LocalEntry*> known;
  std::vector<const LocalEntry*> apart;
  for (LocalEntry& entry : entries) {
    if (entry.what.bytes == 0) continue;
    if (entry.writable != nullptr && entry.memory.item == 0)
      entry.memory = contiguous(entry.writable, entry.what.bytes);
    if (entry.memory.item == 0) continue;
    const auto [at, added] =
        known.try_emplace({entry.memory, entry.what.kind, entry.what.loose}, &entry);
    if (added) {
      apart.push_back(&entry);
    } else if (entry.memory.written) {
      entry.what.tie = at->second->what.name;
    }
  }
  const auto begin = [](const LocalEntry* entry) { return span_of(entry->memory).first; };
  std::sort(apart.begin(), apart.end(),
            [&](const LocalEntry* a, const LocalEntry* b) { return begin(a) < begin(b); });
  std::vector<const LocalEntry*> open;  // entries that may extend into the next ones
  std::size_t looks = 0;  // at pairs: their number is quadratic if all entries are interleaved
  for (const LocalEntry* entry : apart) {
    std::erase_if(open, [&](const LocalEntry* before) {
      return span_of(before->memory).second <= begin(entry);
    });
    for (const LocalEntry* before : open) {
      if (++looks % kLooks == 0 && stop && stop()) return std::nullopt;
      if (!before->memory.written && !entry->memory.written) continue;
      if (!overlap(before->memory, entry->memory)) continue;
      const auto& [first, second] = std::minmax(before->what.name, entry->what.name);
      return first + " and " + second +
             " share memory, so that writing one changes the other; pass a copy of one";
    }
    open.push_back(entry);
  }
  return std::string();
}

Result<std::shared_ptr<LocalState>> hash(std::vector<LocalEntry> entries, Parallel& parallel,
                                         const std::function<bool()>& stop) {
  const auto refuse = [](std::string reason) {
    return Error{Code::invalid_argument, std::move(reason)};
  };
  if (entries.size() > kMaxEntries) return refuse("the state has more than 65536 entries");
  std::size_t described = 0;
  std::sort(entries.begin(), entries.end(),
            [](const LocalEntry& a, const LocalEntry& b) { return a.what.name < b.what.name; });
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::string& name = entries[i].what.name;
    if (name.size() > kMaxName) return refuse("an entry's name is longer than 1024 bytes");
    if (i > 0 && entries[i - 1].what.name == name) return refuse("two entries are named " + name);
    const wire::StateEntry& what = entries[i].what;
    described += name.size() + what.kind.size() + what.containers.size() + 8 * what.shape.size();
    described += kEntryOverhead;
  }
  auto state = std::make_shared<LocalState>();
  state->entries = std::move(entries);
  std::optional<std::string> flaw = find_ties(state->entries, stop);
  if (!flaw) return Error{Code::interrupted, "interrupted"};
  state->flaw = std::move(*flaw);
  if (!state->flaw.empty()) return state;
  for (const LocalEntry& entry : state->entries) described += entry.what.tie.size();
  if (described > kMaxDescription)
    return refuse("the descriptions of the state's entries take more than 15 MiB");
  Manifest& manifest = state->manifest;
  for (const LocalEntry& entry : state->entries) manifest.entries.push_back(entry.what);
  const ChunkIndex index(manifest.entries);
  if (index.count() > kMaxChunks) return refuse("the state has more than 4 TiB");
  manifest.chunks.resize(index.count());

  std::atomic<bool> stopped{false};
  const std::thread::id caller = std::this_thread::get_id();
  parallel.run((index.count() + kBatch - 1) / kBatch, [&](std::size_t part) {
    if (stopped) return;
    if (stop && std::this_thread::get_id() == caller && stop()) stopped = true;
    const std::uint64_t begin = part * kBatch;
    const std::uint64_t end = std::min(begin + kBatch, index.count());
    for (std::uint64_t chunk = begin; chunk < end; ++chunk) {
      const ChunkRange range = index.at(chunk);
      manifest.chunks[chunk] =
          digest({state->entries[range.entry].data + range.offset, range.bytes});
    }
  });
  if (stopped) return Error{Code::interrupted, "interrupted"};

  fill_contents(*state, index);
  return state;
}

}  // namespace pccl::state
