#include "pccl/net/address.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>

namespace pccl::net {

Result<wire::Address> parse_address(std::string_view text, std::uint16_t default_port) {
  const auto fail = [&](const char* why) {
    return Error{Code::invalid_argument,
                 "\"" + std::string(text.substr(0, 100)) + "\" is no \"host:port\": " + why,
                 {},
                 {}};
  };
  std::string_view host = text;
  std::string_view port;
  bool has_port = false;
  if (!text.empty() && text.front() == '[') {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) return fail("a bracket is not closed");
    host = text.substr(1, end - 1);
    const std::string_view rest = text.substr(end + 1);
    if (!rest.empty() && rest.front() != ':') return fail("after the bracket comes a colon");
    has_port = !rest.empty();
    if (has_port) port = rest.substr(1);
    asio::error_code error;
    asio::ip::make_address_v6(std::string(host), error);
    if (error) return fail("no IPv6 address stands in the brackets");
  } else if (std::count(text.begin(), text.end(), ':') == 1) {
    const std::size_t colon = text.find(':');
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
    has_port = true;
  } else if (text.find(':') != std::string_view::npos) {
    asio::error_code error;
    asio::ip::make_address_v6(std::string(text), error);
    if (error) return fail("it has several colons, but is no IPv6 address");
  }
  if (text.empty()) return fail("it is empty");
  if (host.size() > 255 || host.find_first_of(" \t\r\n/") != std::string_view::npos ||
      host.find('\0') != std::string_view::npos) {
    return fail("the host cannot be a name or an address");
  }
  // The system's resolver would take "5" for 0.0.0.5.
  if (!host.empty() && host.find_first_not_of("0123456789") == std::string_view::npos)
    return fail("a number alone is no host; a port comes after one, as in \"0.0.0.0:48148\"");
  wire::Address address{std::string(host), default_port};
  if (has_port) {
    unsigned number = 0;
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
    if (error != std::errc() || end != port.data() + port.size() || number > 65535) {
      return fail("the port must be a number up to 65535");
    }
    address.port = static_cast<std::uint16_t>(number);
  }
  return address;
}

std::string to_string(const wire::Address& address) {
  const bool bracket = address.host.find(':') != std::string::npos;
  return (bracket ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
}

std::string to_string(const asio::ip::tcp::endpoint& endpoint) {
  return to_string(wire::Address{plain(endpoint.address()).to_string(), endpoint.port()});
}

std::optional<asio::ip::tcp::endpoint> numeric_endpoint(const wire::Address& address) {
  asio::error_code error;
  const asio::ip::address host = asio::ip::make_address(address.host, error);
  if (error) return std::nullopt;
  return asio::ip::tcp::endpoint(host, address.port);
}

asio::ip::address plain(const asio::ip::address& address) {
  if (!address.is_v6() || !address.to_v6().is_v4_mapped()) return address;
  return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
}

bool same_host(const asio::ip::tcp::endpoint& local, const asio::ip::tcp::endpoint& remote) {
  return plain(remote.address()).is_loopback() || plain(local.address()) == plain(remote.address());
}

Reach reach_of(const std::string& host) {
  asio::error_code error;
  const asio::ip::address address = plain(asio::ip::make_address(host, error));
  if (error || address.is_unspecified() || address.is_multicast()) return Reach::nobody;
  if (address.is_loopback()) return Reach::host;
  if (address.is_v6()) {
    const asio::ip::address_v6 v6 = address.to_v6();
    if (v6.is_link_local()) return Reach::nobody;
    const bool unique_local = (v6.to_bytes()[0] & 0xFE) == 0xFC;
    return unique_local || v6.is_site_local() ? Reach::network : Reach::everybody;
  }
  const std::uint32_t v4 = address.to_v4().to_uint();
  const auto within = [&](std::uint32_t network, unsigned bits) {
    return (v4 ^ network) >> (32 - bits) == 0;
  };
  if (within(0x00000000, 8) || within(0xA9FE0000, 16) || v4 == 0xFFFFFFFF) return Reach::nobody;
  const bool shared = within(0x0A000000, 8) || within(0xAC100000, 12) || within(0xC0A80000, 16) ||
                      within(0x64400000, 10);
  return shared ? Reach::network : Reach::everybody;
}

std::vector<std::string> interface_addresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {"127.0.0.1"};
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  std::vector<std::string> found;
  std::vector<std::string> loopback;
  for (const ifaddrs* item = list; item != nullptr; item = item->ifa_next) {
    if (item->ifa_addr == nullptr || (item->ifa_flags & IFF_UP) == 0) continue;
    asio::ip::address address;
    if (item->ifa_addr->sa_family == AF_INET) {
      sockaddr_in raw{};
      std::memcpy(&raw, item->ifa_addr, sizeof raw);
      address = asio::ip::address_v4(ntohl(raw.sin_addr.s_addr));
    } else if (item->ifa_addr->sa_family == AF_INET6) {
      sockaddr_in6 raw{};
      std::memcpy(&raw, item->ifa_addr, sizeof raw);
      asio::ip::address_v6::bytes_type bytes;
      std::memcpy(bytes.data(), &raw.sin6_addr, bytes.size());
      const asio::ip::address_v6 v6(bytes);
      if (v6.is_link_local()) continue;
      address = v6;
    } else {
      continue;
    }
    auto& where = address.is_loopback() ? loopback : found;
    const std::string text = address.to_string();
    if (std::find(where.begin(), where.end(), text) == where.end()) where.push_back(text);
  }
  found.insert(found.end(), loopback.begin(), loopback.end());
  return found;
}

}  // namespace pccl::net
