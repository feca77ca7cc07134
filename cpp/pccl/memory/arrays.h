// Arrays of this process that peers of its host may read where they are. Which arrays those are is
// known by address, so that an array needs no more than its memory to be recognised, whatever
// framework it came through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "pccl/memory/region.h"

namespace pccl::memory {

// Memory in which one array lies, or many small ones; there as long as one of them is.
struct Chunk {
  RegionPtr region;
  std::uint64_t number = 0;  // what others know it by, different for each of this process
};
using ChunkPtr = std::shared_ptr<const Chunk>;

// Where some bytes are.
struct Place {
  ChunkPtr chunk;
  std::uint64_t offset = 0;
};

// Memory for an array, zeroed, aligned to 64 bytes; given back when the chunk is dropped. *any
// thread*
[[nodiscard]] Result<Place> make_array(std::size_t size);

// Where that is; nothing when it is not (all of it) in memory made above. *any thread*
[[nodiscard]] std::optional<Place> find_array(const void* data, std::size_t size);

}  // namespace pccl::memory
