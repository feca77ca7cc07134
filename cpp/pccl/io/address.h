// Addresses as the system takes them: endpoints of sockets, and this host's interfaces.
#pragma once

#include <asio/ip/tcp.hpp>
#include <optional>
#include <string>
#include <vector>

#include "pccl/wire/address.h"

namespace pccl::io {

[[nodiscard]] std::string to_string(const asio::ip::tcp::endpoint& endpoint);

// Nothing when the host is a name, to be resolved.
[[nodiscard]] std::optional<asio::ip::tcp::endpoint> numeric_endpoint(const wire::Address& address);

// An IPv4 address that a dual-stack socket shows as IPv6 becomes IPv4 again.
[[nodiscard]] asio::ip::address plain(const asio::ip::address& address);

// Both ends of a connection are on one host.
[[nodiscard]] bool same_host(const asio::ip::tcp::endpoint& local,
                             const asio::ip::tcp::endpoint& remote);

// Addresses of this host's interfaces at which others may find it: those that are up; loopback
// last; no link-local ones, which mean nothing without the interface's name.
[[nodiscard]] std::vector<std::string> interface_addresses();

}  // namespace pccl::io
