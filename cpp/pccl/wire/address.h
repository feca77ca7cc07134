// Addresses as text, and from which hosts an address can be reached. Pure: resolves no names and
// reads no interfaces.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/wire/records.h"

namespace pccl::wire {

inline constexpr std::uint16_t kDefaultPort = 48148;

// Accepts "host", "host:port", "1.2.3.4:5", "[::1]:48148" and "::1". The host of ":48148" is
// empty. Without a port the address gets `default_port`. invalid_argument: names the mistake.
[[nodiscard]] Result<Address> parse_address(std::string_view text, std::uint16_t default_port);
// The addresses of a run's masters: one, or several with commas between them, the preferred one
// first. invalid_argument: names the mistake.
inline constexpr std::size_t kMaxMasters = 16;
[[nodiscard]] Result<std::vector<Address>> parse_masters(std::string_view text,
                                                         std::uint16_t default_port);
// "host:port"; an IPv6 host stands in brackets.
[[nodiscard]] std::string to_string(const Address& address);

// The hosts for which an address denotes the same host.
enum class Reach : std::uint8_t { nobody, host, network, everybody };
// Loopback addresses: `host`. Private networks and the shared range of providers (RFC 6598):
// `network`. "Any", link-local and multicast addresses, and names: `nobody`.
[[nodiscard]] Reach reach_of(const std::string& host);

}  // namespace pccl::wire
