#include "pccl/capi/environment.h"

#include <charconv>
#include <cstdlib>
#include <string>
#include <string_view>

#include "pccl/io/address.h"

namespace pccl::capi {
namespace {

// Empty counts as unset.
std::string_view text(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? std::string_view() : value;
}

std::string_view trim(std::string_view part) {
  constexpr std::string_view kBlank = " \t\r\n";
  const std::size_t first = part.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return part.substr(first, part.find_last_not_of(kBlank) - first + 1);
}

}  // namespace

Result<std::uint16_t> own_port() {
  const std::string_view given = text("PCCL_PORT");
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), port);
  if (!given.empty() && (error != std::errc() || end != given.data() + given.size())) {
    return Error{Code::invalid_argument,
                 "PCCL_PORT must be a port, not \"" + std::string(given) + "\"",
                 {},
                 {}};
  }
  return port;
}

Result<std::vector<wire::Address>> advertised() {
  std::vector<wire::Address> addresses;
  std::string_view rest = text("PCCL_ADVERTISE");
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    const std::string_view part = trim(rest.substr(0, comma));
    rest.remove_prefix(comma == std::string_view::npos ? rest.size() : comma + 1);
    if (part.empty()) continue;
    auto address = wire::parse_address(part, 0);
    if (!address) return address.error();
    if (address->host.empty()) {
      return Error{Code::invalid_argument,
                   "PCCL_ADVERTISE: \"" + std::string(part) + "\" names no host",
                   {},
                   {}};
    }
    addresses.push_back(std::move(*address));
  }
  return addresses;
}

}  // namespace pccl::capi
