// Identities and instants shared by every room.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>

namespace pccl {

// A time on this machine's steady clock. Never sent to other machines; simulated in tests.
using Instant = std::chrono::steady_clock::time_point;
using Duration = std::chrono::nanoseconds;

[[nodiscard]] constexpr double in_seconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// At most what 32 bits hold: 49 days.
[[nodiscard]] constexpr std::uint32_t in_milliseconds(Duration duration) {
  const auto count = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
  return static_cast<std::uint32_t>(std::min<std::int64_t>(count, 0xffffffff));
}

using Bytes16 = std::array<std::uint8_t, 16>;
[[nodiscard]] std::string hex_digits(const Bytes16& bytes, std::size_t count);  // of `count` bytes
[[nodiscard]] Bytes16 random_bytes16();  // cannot be guessed; not all zero

// 128 bits. Each kind is a type of its own, so that none is taken for another.
template <class Kind>
struct Bits128 {
  Bytes16 bytes{};
  auto operator<=>(const Bits128&) const = default;
  [[nodiscard]] bool empty() const { return *this == Bits128{}; }
  [[nodiscard]] std::string hex() const { return hex_digits(bytes, 16); }
  [[nodiscard]] std::string brief() const { return hex_digits(bytes, 4); }  // for a log line
  static Bits128 random() { return {random_bytes16()}; }
};

// Chosen by the peer when it joins, never reused. All zero: no peer.
using PeerId = Bits128<struct PeerIdKind>;
// A peer's secret, by which the master knows it again (digest/ticket.h), and what others know of
// it.
using Ticket = Bits128<struct TicketKind>;
using Seal = Bits128<struct SealKind>;
// Neighbours that have it may share memory with the peer. All zero: it shares none.
using MemoryKey = Bits128<struct MemoryKeyKind>;
// The key that neighbours prove to each other to know, and such a proof or its challenge.
using HostKey = Bits128<struct HostKeyKind>;
using Proof = Bits128<struct ProofKind>;
// One end of a connection through the master, which knows it by this. All zero: no relay.
using RelayToken = Bits128<struct RelayTokenKind>;

}  // namespace pccl
