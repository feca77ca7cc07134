#include "pccl/digest/xxh3.h"

#include <array>

#include "pccl/digest/xxh3.inl"

namespace pccl::digest {
namespace {

constexpr Xxh3 kBaseline{"baseline", &hash64, &hash128, &copy128};

}  // namespace

#if defined(__x86_64__)
extern const Xxh3 kXxh3Avx2;

std::span<const Xxh3* const> xxh3_sets() {
  static constexpr std::array<const Xxh3*, 2> kSets{&kXxh3Avx2, &kBaseline};
  return std::span(kSets).subspan(__builtin_cpu_supports("avx2") ? 0 : 1);
}
#else
std::span<const Xxh3* const> xxh3_sets() {
  static constexpr std::array<const Xxh3*, 1> kSets{&kBaseline};
  return kSets;
}
#endif

namespace {

const Xxh3& best() {
  static const Xxh3& set = *xxh3_sets().front();
  return set;
}

}  // namespace

std::uint64_t xxh3_64(std::span<const std::uint8_t> head, std::span<const iovec> parts) {
  return best().hash64(head.data(), head.size(), parts.data(), parts.size());
}

Hash128 xxh3_128(std::span<const std::uint8_t> bytes) {
  return best().hash128(bytes.data(), bytes.size());
}

Hash128 copy_xxh3_128(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) {
  return best().copy128(to, from, bytes);
}

}  // namespace pccl::digest
