// The chunks that a receiver of a sync fetches, and the memory that holds them until its end.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pccl/base/buffer.h"
#include "pccl/base/parallel.h"
#include "pccl/state/manifest.h"

namespace pccl::state {

// The changes that a sync makes here, kept apart from the old state.
struct Update {
  struct Copy {
    std::uint8_t* to = nullptr;
    const std::uint8_t* from = nullptr;
    std::uint64_t bytes = 0;
  };
  struct Replacement {
    wire::StateEntry what;
    BufferPtr bytes;  // never null; no memory for an empty entry
  };
  // Writes the changes, in parallel. Call once, before the replacements are used. *the caller's
  // thread*
  void place(Parallel& parallel);

  std::vector<Copy> kept;                 // from our own entries to replacements
  std::vector<Copy> writes;               // from `staging` to our own entries, which do not overlap
  std::vector<std::string> written;       // names of the entries with new bytes in their own memory
  std::vector<Replacement> replacements;  // the other entries, whole
  BufferPtr staging;
  std::uint64_t tx_bytes = 0;  // of chunks
  std::uint64_t rx_bytes = 0;
  wire::SyncDecision decision;
};

// Created once the elected manifest has arrived. *one thread: the engine's*
class FetchPlan {
 public:
  struct Chunk {
    std::uint8_t* to = nullptr;  // where it is kept until the end, or its place in our own entry
    std::uint64_t bytes = 0;
    bool loose = false;
    // If it overwrites a chunk of our own: the entry and the hash.
    LocalEntry* entry = nullptr;
    wire::Digest* hash = nullptr;
    bool placed = false;  // it is being received
  };

  // Compares the elected state with `mine`, whose chunks are in `my_index`. `newcomer`: loose
  // entries are fetched too. REQUIRES: valid(elected, ...), and `mine` outlives this. Throws
  // std::bad_alloc.
  FetchPlan(Manifest elected, LocalState& mine, const ChunkIndex& my_index, bool newcomer,
            BufferPool& pool);
  FetchPlan(const FetchPlan&) = delete;
  FetchPlan& operator=(const FetchPlan&) = delete;

  // -- requests
  [[nodiscard]] bool all_asked() const { return strict_.empty() && loose_.empty(); }
  // Takes the number of the next chunk to ask for. `loose`: prefers chunks of loose entries, which
  // otherwise are not returned. Empty: no such chunk is left.
  std::optional<std::uint32_t> next(bool loose);
  // These chunks will not arrive: they are requested again, before all others.
  void retry(std::span<const std::uint32_t> numbers);

  // While it is held, nothing is to be asked for.
  void hold(bool held) { held_ = held; }
  [[nodiscard]] bool held() const { return held_; }

  // Some chunks are of loose entries, which come from one source.
  [[nodiscard]] bool has_loose() const { return has_loose_; }

  // The memory that chunks are received into, about in the order in which they are requested.
  [[nodiscard]] std::vector<BufferPtr> memory() const;

  // -- receiving
  // REQUIRES: the chunk is part of the plan.
  [[nodiscard]] const Chunk& chunk(std::uint32_t number) const { return chunks_.at(number); }
  // The chunk is about to be received: from now on its memory changes.
  void place(std::uint32_t number);
  // A frame with this chunk did not arrive. Does nothing if the chunk is not part of the plan.
  void unplace(std::uint32_t number);
  // The chunk has arrived in its memory, and has this digest. False: it is another one than the
  // manifest's, so the chunk is requested again.
  [[nodiscard]] bool accept(std::uint32_t number, const wire::Digest& found);
  [[nodiscard]] bool complete() const { return left_ == 0; }
  [[nodiscard]] std::uint64_t bytes_done() const { return bytes_done_; }
  [[nodiscard]] std::uint64_t bytes_wanted() const { return bytes_wanted_; }

  // Entries of the elected state that are new here, or that replace an entry that cannot be
  // written.
  [[nodiscard]] std::vector<wire::StateEntry> replacements() const;
  // Moves the changes into `update`. REQUIRES: complete().
  void finish(Update& update);

 private:
  // An entry of the elected state that is received.
  struct Incoming {
    std::uint32_t entry = 0;
    const LocalEntry* mine = nullptr;
    bool in_place = false;
    BufferPtr whole;  // not in place: the new entry; no memory for an empty one
  };
  void add_entry(std::uint32_t entry, LocalEntry* own, const ChunkIndex& my_index,
                 BufferPool& pool);
  void make_stage(BufferPool& pool);

  Manifest elected_;
  LocalState& mine_;
  ChunkIndex index_;
  std::vector<Incoming> incoming_;
  // The chunks that are written in place at the end, one after the other. One block for all
  // entries: many small ones would not be in huge pages.
  BufferPtr stage_;
  std::vector<std::string> tied_;   // names of entries that are the memory of one in `incoming_`
  std::vector<Update::Copy> kept_;  // chunks that replacements take from our own entries
  std::map<std::uint32_t, Chunk> chunks_;
  std::deque<std::uint32_t> strict_;  // chunks to ask for, from any source
  std::deque<std::uint32_t> loose_;   // from the first source only
  bool has_loose_ = false;
  bool held_ = false;
  std::uint64_t left_ = 0;  // chunks that have not arrived
  std::uint64_t bytes_done_ = 0;
  std::uint64_t bytes_wanted_ = 0;
};

}  // namespace pccl::state
