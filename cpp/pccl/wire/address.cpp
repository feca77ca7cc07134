#include "pccl/wire/address.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

namespace pccl::wire {
namespace {

using V6 = std::array<std::uint8_t, 16>;
constexpr V6 kLoopback = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
constexpr std::array<std::uint8_t, 12> kMappedV4 = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};

// Ignores an interface after "%".
std::optional<V6> ipv6(std::string_view text) {
  const std::string address(text.substr(0, text.find('%')));
  V6 bytes{};
  if (::inet_pton(AF_INET6, address.c_str(), bytes.data()) != 1) return std::nullopt;
  return bytes;
}

std::optional<std::uint32_t> ipv4(const std::string& text) {
  in_addr address{};
  if (::inet_pton(AF_INET, text.c_str(), &address) != 1) return std::nullopt;
  return ntohl(address.s_addr);
}

Reach reach_of_v4(std::uint32_t address) {
  const auto within = [&](std::uint32_t network, unsigned bits) {
    return (address ^ network) >> (32 - bits) == 0;
  };
  if (within(0x7F000000, 8)) return Reach::host;
  if (within(0x00000000, 8) || within(0xA9FE0000, 16) || within(0xE0000000, 4) ||
      address == 0xFFFFFFFF)
    return Reach::nobody;
  const bool shared = within(0x0A000000, 8) || within(0xAC100000, 12) || within(0xC0A80000, 16) ||
                      within(0x64400000, 10);
  return shared ? Reach::network : Reach::everybody;
}

Reach reach_of_v6(const V6& address) {
  if (address == kLoopback) return Reach::host;
  if (address == V6{} || address[0] == 0xFF) return Reach::nobody;  // any; multicast
  const auto first = static_cast<unsigned>(address[0] << 8U | address[1]);
  if ((first & 0xFFC0) == 0xFE80) return Reach::nobody;   // link-local
  if ((first & 0xFFC0) == 0xFEC0) return Reach::network;  // site-local
  return (first & 0xFE00) == 0xFC00 ? Reach::network : Reach::everybody;
}

}  // namespace

Result<Address> parse_address(std::string_view text, std::uint16_t default_port) {
  const auto fail = [&](const char* why) {
    return Result<Address>(Code::invalid_argument, "\"" + std::string(text.substr(0, 100)) +
                                                       "\" is not \"host:port\": " + why);
  };
  std::string_view host = text;
  std::string_view port;
  bool has_port = false;
  if (text.find("://") != std::string_view::npos)
    return fail("write host:port, without a protocol such as http://");
  if (!text.empty() && text.front() == '[') {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) return fail("a bracket is not closed");
    host = text.substr(1, end - 1);
    const std::string_view rest = text.substr(end + 1);
    if (!rest.empty() && rest.front() != ':') return fail("a colon must follow the bracket");
    has_port = !rest.empty();
    if (has_port) port = rest.substr(1);
    if (!ipv6(host)) return fail("the brackets do not contain an IPv6 address");
  } else if (std::count(text.begin(), text.end(), ':') == 1) {
    const std::size_t colon = text.find(':');
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
    has_port = true;
  } else if (text.find(':') != std::string_view::npos) {
    if (!ipv6(text)) return fail("it has several colons but is not an IPv6 address");
  }
  if (text.empty()) return fail("it is empty");
  if (host.size() > 255 || host.find_first_of(" \t\r\n/@") != std::string_view::npos ||
      host.find('\0') != std::string_view::npos) {
    return fail("the host is neither a name nor an address");
  }
  // The system's resolver would read "5" as 0.0.0.5.
  if (!host.empty() && host.find_first_not_of("0123456789") == std::string_view::npos)
    return fail(
        "a number alone is not a host; write the port after a host, as in \"0.0.0.0:48148\"");
  Address address{std::string(host), default_port};
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

Result<std::vector<Address>> parse_masters(std::string_view text, std::uint16_t default_port) {
  std::vector<Address> masters;
  for (;;) {
    const std::size_t comma = text.find(',');
    std::string_view part = text.substr(0, comma);
    while (!part.empty() && part.front() == ' ') part.remove_prefix(1);
    while (!part.empty() && part.back() == ' ') part.remove_suffix(1);
    auto address = parse_address(part, default_port);
    if (!address) return address.error();
    if (std::find(masters.begin(), masters.end(), *address) != masters.end()) {
      return {Code::invalid_argument, "the master " + to_string(*address) + " is listed twice"};
    }
    masters.push_back(std::move(*address));
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
  }
  if (masters.size() > kMaxMasters) {
    return {Code::invalid_argument, std::to_string(masters.size()) +
                                        " masters are over the limit of " +
                                        std::to_string(kMaxMasters)};
  }
  return masters;
}

std::string to_string(const Address& address) {
  const bool bracket = address.host.find(':') != std::string::npos;
  return (bracket ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
}

Reach reach_of(const std::string& host) {
  if (const auto v4 = ipv4(host)) return reach_of_v4(*v4);
  const auto v6 = ipv6(host);
  if (!v6) return Reach::nobody;
  if (!std::equal(kMappedV4.begin(), kMappedV4.end(), v6->begin())) return reach_of_v6(*v6);
  std::uint32_t mapped = 0;
  for (std::size_t i = kMappedV4.size(); i < v6->size(); ++i) mapped = mapped << 8U | (*v6)[i];
  return reach_of_v4(mapped);
}

}  // namespace pccl::wire
