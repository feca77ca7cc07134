// What the kernel knows of a TCP connection.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "pccl/base/error.h"
#include "pccl/base/ids.h"

namespace pccl::io {

struct TcpInfo {
  Duration least_rtt{};         // of the connection's life
  Duration busy{};              // how long there was something to send ...
  Duration held_by_sender{};    // ... but no room in the send buffer for more
  Duration held_by_receiver{};  // ... but no room at the receiver
};
// Nothing where the kernel does not tell.
[[nodiscard]] std::optional<TcpInfo> tcp_info(int descriptor);

// Whether connections may be made with that congestion control, by name.
[[nodiscard]] Status check_congestion_control(const std::string& name);
void set_congestion_control(int descriptor, const std::string& name);

}  // namespace pccl::io
