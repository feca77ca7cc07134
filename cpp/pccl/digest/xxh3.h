// XXH3 of much memory, with the widest vectors that this processor has: twice to three times the
// speed of the build's own (docs/internals/decisions/050-xxhash.md). All functions: *any thread*.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace pccl::digest {

struct Hash128 {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
};

// XXH3-64 of `head` and the parts, as if they lay one after the other.
[[nodiscard]] std::uint64_t xxh3_64(std::span<const std::uint8_t> head,
                                    std::span<const iovec> parts);
[[nodiscard]] Hash128 xxh3_128(std::span<const std::uint8_t> bytes);
// Copies memory in one pass and returns the XXH3-128 of what it has written, also if `from` changes
// meanwhile. The target is written past the caches, where the processor can.
[[nodiscard]] Hash128 copy_xxh3_128(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes);

// The functions above for one instruction set. They give the same hashes.
struct Xxh3 {
  const char* name;
  std::uint64_t (*hash64)(const void* head, std::size_t bytes, const iovec* parts,
                          std::size_t count);
  Hash128 (*hash128)(const void* data, std::size_t bytes);
  Hash128 (*copy128)(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes);
};
// Those that this processor has, best first.
[[nodiscard]] std::span<const Xxh3* const> xxh3_sets();

}  // namespace pccl::digest
