// XXH3 for the instruction set of the file that includes this. All functions have internal linkage,
// those of xxHash by XXH_INLINE_ALL.
#include <xxhash.h>

#include "pccl/digest/xxh3.h"

namespace pccl::digest {
namespace {

std::uint64_t hash64(const void* head, std::size_t bytes, const iovec* parts, std::size_t count) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, head, bytes);
  for (const iovec* part = parts; part != parts + count; ++part)
    XXH3_64bits_update(&state, part->iov_base, part->iov_len);
  return XXH3_64bits_digest(&state);
}

Hash128 hash128(const void* data, std::size_t bytes) {
  const XXH128_hash_t hash = XXH3_128bits(data, bytes);
  return {hash.low64, hash.high64};
}

}  // namespace

}  // namespace pccl::digest
