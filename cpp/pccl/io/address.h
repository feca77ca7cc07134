// Addresses of sockets, and of this host's interfaces.
#pragma once

#include <asio/ip/tcp.hpp>
#include <optional>
#include <string>
#include <vector>

#include "pccl/wire/address.h"

namespace pccl::io {

[[nodiscard]] std::string to_string(const asio::ip::tcp::endpoint& endpoint);

// Nothing if the host is a name, which must be resolved.
[[nodiscard]] std::optional<asio::ip::tcp::endpoint> numeric_endpoint(const wire::Address& address);

// Whether `listed` stands for the numeric address `address`. A name is resolved, which may take
// seconds; one that cannot be resolved stands for nothing.
[[nodiscard]] bool stands_for(const wire::Address& listed, const wire::Address& address);

// Turns an IPv4 address that a dual-stack socket reports as IPv6 back into IPv4.
[[nodiscard]] asio::ip::address plain(const asio::ip::address& address);

// Whether both ends of a connection are on one host.
[[nodiscard]] bool same_host(const asio::ip::tcp::endpoint& local,
                             const asio::ip::tcp::endpoint& remote);

// Addresses of this host's interfaces that are up, loopback last. Without link-local addresses,
// which are ambiguous without the name of an interface.
[[nodiscard]] std::vector<std::string> interface_addresses();

}  // namespace pccl::io
