// Addresses as text: what people write, and what an address means to other hosts.
// Pure: nothing is resolved, and no interface is asked.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "pccl/base/error.h"
#include "pccl/wire/records.h"

namespace pccl::wire {

inline constexpr std::uint16_t kDefaultPort = 48148;

// Accepts "host", "host:port", "1.2.3.4:5", "[::1]:48148" and "::1". The host of ":48148" is
// empty. Without a port the address gets `default_port`. invalid_argument: what is wrong.
[[nodiscard]] Result<Address> parse_address(std::string_view text, std::uint16_t default_port);
// "host:port"; an IPv6 host stands in brackets.
[[nodiscard]] std::string to_string(const Address& address);

// The hosts for which an address means the same host.
enum class Reach : std::uint8_t { nobody, host, network, everybody };
// Loopback addresses: `host`. Private networks, and the shared range of providers: `network`.
// "Any", link-local and multicast addresses, and names: `nobody`.
[[nodiscard]] Reach reach_of(const std::string& host);

}  // namespace pccl::wire
