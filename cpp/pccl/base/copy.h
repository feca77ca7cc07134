// Copies memory at full speed, independently of the C library.
#pragma once

#include <cstddef>

namespace pccl {

// Like memcpy. On some processors glibc's memcpy falls to a fifth of the memory's speed when source
// and target have nearly the same offset in their pages (glibc bug 30994): the usual case between a
// page-aligned buffer and an array behind malloc's header.
void copy(void* to, const void* from, std::size_t bytes);

// Like copy(), with non-temporal stores: the target is not read first and evicts nothing from the
// caches. For targets that will not be read soon.
void copy_past_cache(void* to, const void* from, std::size_t bytes);

// Use copy_past_cache() for arrays of at least this size.
inline constexpr std::size_t kPastCacheFrom = std::size_t{8} << 20;

}  // namespace pccl
