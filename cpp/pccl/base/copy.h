// Copying memory at its speed, whatever the C library makes of it.
#pragma once

#include <cstddef>

namespace pccl {

// Like memcpy. That of glibc falls to a fifth of the memory's speed on some processors when source
// and target lie at nearly the same place in their pages (its bug 30994): the usual case between a
// page-aligned buffer and an array behind malloc's header.
void copy(void* to, const void* from, std::size_t bytes);

// The same for a target that will not be read soon, of an array larger than the caches: it is
// written past them, so that it is not read first and pushes nothing out.
void copy_past_cache(void* to, const void* from, std::size_t bytes);

// Arrays from this size on are written past the caches.
inline constexpr std::size_t kPastCacheFrom = std::size_t{8} << 20;

}  // namespace pccl
