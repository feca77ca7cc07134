#include "pccl/state/fetch_plan.h"

#include <algorithm>
#include <utility>

#include "pccl/base/copy.h"

namespace pccl::state {
namespace {

constexpr std::uint64_t kAlignment = 64;  // of chunks in the stage
constexpr std::size_t kCopiesAtOnce = 8;  // one part of the work; each copies a chunk at most

void make(const std::vector<Update::Copy>& copies, Parallel& parallel) {
  std::uint64_t bytes = 0;
  for (const Update::Copy& each : copies) bytes += each.bytes;
  const auto how = bytes >= kPastCacheFrom ? &copy_past_cache : &copy;
  parallel.run((copies.size() + kCopiesAtOnce - 1) / kCopiesAtOnce, [&](std::size_t part) {
    const std::size_t end = std::min((part + 1) * kCopiesAtOnce, copies.size());
    for (std::size_t i = part * kCopiesAtOnce; i < end; ++i)
      how(copies[i].to, copies[i].from, copies[i].bytes);
  });
}

}  // namespace

void Update::place(Parallel& parallel) {
  make(kept, parallel);  // first: the writes change our own entries
  make(writes, parallel);
  kept.clear();
  writes.clear();
  staging.reset();
}

FetchPlan::FetchPlan(Manifest elected, LocalState& mine, const ChunkIndex& my_index, bool newcomer,
                     BufferPool& pool)
    : elected_(std::move(elected)), mine_(mine), index_(elected_.entries) {
  auto own = mine_.entries.begin();
  for (std::uint32_t e = 0; e < elected_.entries.size(); ++e) {
    const wire::StateEntry& entry = elected_.entries[e];
    while (own != mine_.entries.end() && own->what.name < entry.name) ++own;
    const bool known = own != mine_.entries.end() && own->what.name == entry.name;
    // Only newcomers receive loose entries that they have already.
    if (known && (own->what.content == entry.content || (entry.loose && !newcomer))) continue;
    if (known && own->writable != nullptr && !own->what.tie.empty()) {
      tied_.push_back(entry.name);  // the bytes arrive as another entry's
      continue;
    }
    add_entry(e, known ? &*own : nullptr, my_index, pool);
  }
  make_stage(pool);
  left_ = chunks_.size();
}

void FetchPlan::make_stage(BufferPool& pool) {
  const auto room_of = [](const Chunk& chunk) {
    return (chunk.bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  std::uint64_t room = 0;
  for (const auto& [number, chunk] : chunks_) room += chunk.to == nullptr ? room_of(chunk) : 0;
  stage_ = std::make_shared<const Buffer>(room > 0 ? pool.take(room) : Buffer());
  std::uint8_t* at = stage_->data();
  for (auto& [number, chunk] : chunks_) {
    if (chunk.to != nullptr) continue;
    chunk.to = at;
    at += room_of(chunk);
  }
}

void FetchPlan::add_entry(std::uint32_t e, LocalEntry* own, const ChunkIndex& my_index,
                          BufferPool& pool) {
  const wire::StateEntry& entry = elected_.entries[e];
  const std::uint64_t first = index_.first_of(e);
  const std::uint64_t end = index_.first_of(e + 1);
  const bool same_size = own != nullptr && own->what.bytes == entry.bytes;
  const std::uint64_t my_first =
      own == nullptr ? 0 : my_index.first_of(static_cast<std::size_t>(own - &mine_.entries[0]));
  const auto same = [&](std::uint64_t chunk) {
    return same_size && mine_.manifest.chunks[my_first + chunk - first] == elected_.chunks[chunk];
  };
  Incoming incoming{e, own, same_size && own->writable != nullptr, {}};
  if (!incoming.in_place) {
    incoming.whole =
        std::make_shared<const Buffer>(entry.bytes > 0 ? pool.take(entry.bytes) : Buffer());
  }
  for (std::uint64_t chunk = first; chunk < end; ++chunk) {
    const ChunkRange range = index_.at(chunk);
    std::uint8_t* const to = incoming.in_place ? nullptr : incoming.whole->data() + range.offset;
    if (same(chunk)) {
      // The caller's thread copies it after the sync.
      if (!incoming.in_place) kept_.push_back({to, own->data + range.offset, range.bytes});
      continue;
    }
    const auto number = static_cast<std::uint32_t>(chunk);
    Chunk& made = chunks_[number];
    made = {.to = to, .bytes = range.bytes, .loose = entry.loose};
    if (incoming.in_place && mine_.overwrite) {
      made.to = own->writable + range.offset;
      made.entry = own;
      made.hash = &mine_.manifest.chunks[my_first + chunk - first];
    }
    (entry.loose ? loose_ : strict_).push_back(number);
    has_loose_ = has_loose_ || entry.loose;
    bytes_wanted_ += range.bytes;
  }
  incoming_.push_back(std::move(incoming));
}

std::vector<BufferPtr> FetchPlan::memory() const {
  std::vector<BufferPtr> memory;
  for (const Incoming& incoming : incoming_)
    if (!incoming.in_place && *incoming.whole) memory.push_back(incoming.whole);
  if (*stage_) memory.push_back(stage_);
  return memory;
}

std::optional<std::uint32_t> FetchPlan::next(bool loose) {
  std::deque<std::uint32_t>& list = loose && !loose_.empty() ? loose_ : strict_;
  if (list.empty()) return std::nullopt;
  const std::uint32_t number = list.front();
  list.pop_front();
  return number;
}

void FetchPlan::retry(std::span<const std::uint32_t> numbers) {
  for (const std::uint32_t number : numbers) {
    Chunk& chunk = chunks_.at(number);
    chunk.placed = false;
    (chunk.loose ? loose_ : strict_).push_front(number);
  }
}

void FetchPlan::place(std::uint32_t number) {
  Chunk& chunk = chunks_.at(number);
  chunk.placed = true;
  if (chunk.hash == nullptr) return;
  *chunk.hash = {};
  chunk.entry->overwritten = mine_.mixed = true;
}

void FetchPlan::unplace(std::uint32_t number) {
  if (const auto it = chunks_.find(number); it != chunks_.end()) it->second.placed = false;
}

bool FetchPlan::accept(std::uint32_t number, const wire::Digest& found) {
  Chunk& chunk = chunks_.at(number);
  chunk.placed = false;
  if (found != elected_.chunks[number]) {
    retry({&number, 1});
    return false;
  }
  if (chunk.hash != nullptr) *chunk.hash = elected_.chunks[number];
  bytes_done_ += chunk.bytes;
  --left_;
  return true;
}

std::vector<wire::StateEntry> FetchPlan::replacements() const {
  std::vector<wire::StateEntry> entries;
  for (const Incoming& incoming : incoming_)
    if (!incoming.in_place) entries.push_back(elected_.entries[incoming.entry]);
  return entries;
}

void FetchPlan::finish(Update& update) {
  update.kept = std::move(kept_);
  update.written = std::move(tied_);
  update.staging = std::move(stage_);
  for (Incoming& incoming : incoming_) {
    if (!incoming.in_place) {
      update.replacements.push_back({elected_.entries[incoming.entry], std::move(incoming.whole)});
      continue;
    }
    const auto first = static_cast<std::uint32_t>(index_.first_of(incoming.entry));
    const auto end = static_cast<std::uint32_t>(index_.first_of(incoming.entry + 1));
    for (auto it = chunks_.lower_bound(first); it != chunks_.end() && it->first < end; ++it) {
      if (it->second.hash != nullptr) continue;
      std::uint8_t* const to = incoming.mine->writable + (it->first - first) * kChunkBytes;
      update.writes.push_back({to, it->second.to, it->second.bytes});
    }
    update.written.push_back(incoming.mine->what.name);
  }
}

}  // namespace pccl::state
