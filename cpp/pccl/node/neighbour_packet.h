// The packets between peers of one host, for neighbours.cpp and its fuzz target.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "pccl/base/ids.h"
#include "pccl/digest/proof.h"

namespace pccl::node {

// Where a peer listens.
inline std::string channel_name(const PeerId& peer) { return "pccl-" + peer.hex(); }

// The one kind of packet, sent as it lies in memory: both ends are on one host.
struct NeighbourPacket {
  enum class Kind : std::uint16_t { hello, welcome, offer, ring, forget, challenge };
  static constexpr std::uint32_t kMagic = 0x4c4c4350;  // "PCLL"
  static constexpr std::uint16_t kVersion = 5;         // also of boards and pages

  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  Kind kind = Kind::ring;
  std::uint64_t host = 0;
  std::uint64_t number = 0;
  std::uint64_t size = 0;
  std::uint64_t offer = 0;
  PeerId from;
  PeerId to;
  Proof proof;

  // The proof, in a hello or a welcome, that its sender knows the listener's key.
  [[nodiscard]] Proof proven(const HostKey& key, const Proof& challenge) const {
    std::array<std::uint64_t, 9> about{static_cast<std::uint64_t>(kind), host, number};
    std::memcpy(&about[3], from.bytes.data(), sizeof from.bytes);
    std::memcpy(&about[5], to.bytes.data(), sizeof to.bytes);
    std::memcpy(&about[7], challenge.bytes.data(), sizeof challenge.bytes);
    return digest::proof(key, about);
  }
};
static_assert(sizeof(NeighbourPacket) == 88, "no padding is sent");

}  // namespace pccl::node
