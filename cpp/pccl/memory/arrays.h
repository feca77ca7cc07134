// Arrays of this process that peers on its host may read directly. They are found by their address,
// so an array is recognised whatever framework it came through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "pccl/memory/region.h"

namespace pccl::memory {

// The memory of one large array, or of many small ones. It lives as long as one of them.
struct Chunk {
  RegionPtr region;
  std::uint64_t number = 0;  // its name for peers; unique in this process
};
using ChunkPtr = std::shared_ptr<const Chunk>;

// The position of some bytes.
struct Place {
  ChunkPtr chunk;
  std::uint64_t offset = 0;
};

// Memory for an array: zeroed, aligned to 64 bytes, freed when the chunk is dropped. Error:
// internal_error (no memory, or too many descriptors). *any thread*
[[nodiscard]] Result<Place> make_array(std::size_t size);

// The place of `data`. Nothing unless all of it is memory from make_array(). *any thread*
[[nodiscard]] std::optional<Place> find_array(const void* data, std::size_t size);

}  // namespace pccl::memory
