// The kernel's statistics of a TCP connection, and its congestion control. All functions: *any
// thread*.
#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace pccl::os {

struct TcpStatistics {
  std::chrono::microseconds least_rtt{};         // since the connection began; 0: not known
  std::chrono::microseconds busy{};              // with bytes to send ...
  std::chrono::microseconds held_by_sender{};    // ... while the send buffer was full
  std::chrono::microseconds held_by_receiver{};  // ... while the receive window was full
};
// Nothing where the kernel does not have all of them.
[[nodiscard]] std::optional<TcpStatistics> tcp_statistics(int descriptor);

// Returns 0, or the error's number: ENOTSUP where the system has no choice.
[[nodiscard]] int set_congestion_control(int descriptor, const std::string& name);
// The names that it takes, separated by blanks. Empty: not known.
[[nodiscard]] std::string congestion_controls();

}  // namespace pccl::os
