// Identities and instants shared by every room.
#pragma once

#include <array>
#include <chrono>
#include <compare>
#include <cstdint>
#include <string>

namespace pccl {

// A time on this machine's steady clock. Never sent to other machines; simulated in tests.
using Instant = std::chrono::steady_clock::time_point;
using Duration = std::chrono::nanoseconds;

[[nodiscard]] constexpr double in_seconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// 128 random bits, chosen by the peer when it joins, never reused. All zero: no peer.
struct PeerId {
  std::array<std::uint8_t, 16> bytes{};
  auto operator<=>(const PeerId&) const = default;
  [[nodiscard]] bool empty() const { return *this == PeerId{}; }
  [[nodiscard]] std::string hex() const;    // 32 digits
  [[nodiscard]] std::string brief() const;  // the first 8 digits: enough for a log line
  static PeerId random();
};

}  // namespace pccl
