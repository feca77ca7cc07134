// Addresses as people write them, as the wire carries them and as the system wants them.
#pragma once

#include <asio/ip/tcp.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/wire/records.h"

namespace pccl::net {

inline constexpr std::uint16_t kDefaultPort = 48148;

// "host", "host:port", "1.2.3.4:5", "[::1]:48148", "::1"; an empty host (":48148") is left empty.
// Without a port: `default_port`.
[[nodiscard]] Result<wire::Address> parse_address(std::string_view text,
                                                  std::uint16_t default_port);
// The other way round; IPv6 in brackets.
[[nodiscard]] std::string to_string(const wire::Address& address);
[[nodiscard]] std::string to_string(const asio::ip::tcp::endpoint& endpoint);

// Nothing when the host is a name, to be resolved.
[[nodiscard]] std::optional<asio::ip::tcp::endpoint> numeric_endpoint(const wire::Address& address);

// An IPv4 address that a dual-stack socket shows as IPv6 becomes IPv4 again.
[[nodiscard]] asio::ip::address plain(const asio::ip::address& address);

// Both ends of a connection are on one host.
[[nodiscard]] bool same_host(const asio::ip::tcp::endpoint& local,
                             const asio::ip::tcp::endpoint& remote);

// For how many hosts an address means the same one.
enum class Reach : std::uint8_t { nobody, host, network, everybody };
// Loopback: for one host. Private networks, and those that providers share: for a network. Neither
// "any", nor link-local ones without their interface, nor many hosts at once, nor names: for
// nobody.
[[nodiscard]] Reach reach_of(const std::string& host);

// Addresses of this host's interfaces at which others may find it: those that are up; loopback
// last; no link-local ones, which mean nothing without the interface's name.
[[nodiscard]] std::vector<std::string> interface_addresses();

}  // namespace pccl::net
