#include "pccl/digest/proof.h"

#include <array>
#include <bit>
#include <cstring>

namespace pccl::digest {
namespace {

struct State {
  std::uint64_t v0, v1, v2, v3;

  void rounds(int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1;
      v1 = std::rotl(v1, 13) ^ v0;
      v0 = std::rotl(v0, 32);
      v2 += v3;
      v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3;
      v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1;
      v1 = std::rotl(v1, 17) ^ v2;
      v2 = std::rotl(v2, 32);
    }
  }
  void take(std::uint64_t part) {
    v3 ^= part;
    rounds(2);
    v0 ^= part;
  }
};

}  // namespace

Proof proof(const HostKey& key, std::span<const std::uint64_t> about) {
  std::array<std::uint64_t, 2> k{};
  std::memcpy(k.data(), key.bytes.data(), sizeof k);
  State state{k[0] ^ 0x736f6d6570736575U, k[1] ^ 0x646f72616e646f6dU ^ 0xeeU,
              k[0] ^ 0x6c7967656e657261U, k[1] ^ 0x7465646279746573U};
  for (const std::uint64_t part : about) state.take(part);
  state.take(static_cast<std::uint64_t>(about.size() * sizeof(std::uint64_t)) << 56);
  std::array<std::uint64_t, 2> result{};
  state.v2 ^= 0xeeU;
  state.rounds(4);
  result[0] = state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
  state.v1 ^= 0xddU;
  state.rounds(4);
  result[1] = state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
  Proof made;
  std::memcpy(made.bytes.data(), result.data(), sizeof result);
  return made;
}

}  // namespace pccl::digest
