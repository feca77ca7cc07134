#include "pccl/capi/address.h"

#include <algorithm>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <string>

#include "pccl/io/address.h"

namespace pccl::capi {
namespace {

ccoip_socket_address_t address_of(const asio::ip::tcp::endpoint& endpoint) {
  ccoip_socket_address_t made{};
  made.port = endpoint.port();
  if (endpoint.address().is_v4()) {
    made.inet.protocol = inetIPv4;
    const auto bytes = endpoint.address().to_v4().to_bytes();
    std::copy(bytes.begin(), bytes.end(), made.inet.ipv4.data);
  } else {
    made.inet.protocol = inetIPv6;
    const auto bytes = endpoint.address().to_v6().to_bytes();
    std::copy(bytes.begin(), bytes.end(), made.inet.ipv6.data);
  }
  return made;
}

}  // namespace

Result<wire::Address> from_c(const ccoip_socket_address_t& address) {
  const auto& inet = address.inet;
  if (inet.protocol == inetIPv4) {
    asio::ip::address_v4::bytes_type bytes;
    std::copy(std::begin(inet.ipv4.data), std::end(inet.ipv4.data), bytes.begin());
    return wire::Address{asio::ip::address_v4(bytes).to_string(), address.port};
  }
  if (inet.protocol == inetIPv6) {
    asio::ip::address_v6::bytes_type bytes;
    std::copy(std::begin(inet.ipv6.data), std::end(inet.ipv6.data), bytes.begin());
    return wire::Address{asio::ip::address_v6(bytes).to_string(), address.port};
  }
  return {Code::invalid_argument, "the address is neither inetIPv4 nor inetIPv6"};
}

Result<ccoip_socket_address_t> to_c(const wire::Address& address) {
  if (const auto numeric = io::numeric_endpoint(address)) return address_of(*numeric);
  asio::io_context context;
  asio::ip::tcp::resolver resolver(context);
  asio::error_code error;
  const auto found = resolver.resolve(address.host, std::to_string(address.port), error);
  if (error || found.empty()) {
    return {Code::invalid_argument, "cannot resolve \"" + address.host + "\": " + error.message()};
  }
  const auto v4 = std::find_if(found.begin(), found.end(), [](const auto& entry) {
    return entry.endpoint().address().is_v4();
  });
  return address_of((v4 == found.end() ? found.begin() : v4)->endpoint());
}

}  // namespace pccl::capi
