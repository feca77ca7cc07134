// XXH3 for the instruction set of the file that includes this. All functions have internal linkage,
// those of xxHash by XXH_INLINE_ALL.
#include <xxhash.h>

#include "pccl/base/copy.h"
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

// Through a buffer that stays in the first cache. The target is neither read nor cached.
Hash128 copy128(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) {
  alignas(64) std::uint8_t piece[16 << 10];  // NOLINT: no inline functions of std::array here
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (std::size_t at = 0; at < bytes; at += sizeof piece) {
    const std::size_t size = bytes - at < sizeof piece ? bytes - at : sizeof piece;
    copy(piece, from + at, size);
    XXH3_128bits_update(&state, piece, size);
    copy_past_cache(to + at, piece, size);
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return {hash.low64, hash.high64};
}

}  // namespace

}  // namespace pccl::digest
