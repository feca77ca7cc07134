// The kernel's statistics of a TCP connection, and its congestion control.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "pccl/base/error.h"
#include "pccl/base/ids.h"

namespace pccl::io {

struct TcpInfo {
  Duration least_rtt{};         // since the connection began
  Duration busy{};              // with bytes to send ...
  Duration held_by_sender{};    // ... while the send buffer was full
  Duration held_by_receiver{};  // ... while the receive window was full
};
// Nothing if the kernel does not have them.
[[nodiscard]] std::optional<TcpInfo> tcp_info(int descriptor);

// Whether connections may use the congestion control with this name.
[[nodiscard]] Status check_congestion_control(const std::string& name);
void set_congestion_control(int descriptor, const std::string& name);

}  // namespace pccl::io
