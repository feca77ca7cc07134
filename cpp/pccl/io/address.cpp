#include "pccl/io/address.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <asio/io_context.hpp>
#include <cstring>
#include <memory>

namespace pccl::io {

std::string to_string(const asio::ip::tcp::endpoint& endpoint) {
  return wire::to_string({plain(endpoint.address()).to_string(), endpoint.port()});
}

std::optional<asio::ip::tcp::endpoint> numeric_endpoint(const wire::Address& address) {
  asio::error_code error;
  const asio::ip::address host = asio::ip::make_address(address.host, error);
  if (error) return std::nullopt;
  return asio::ip::tcp::endpoint(host, address.port);
}

bool stands_for(const wire::Address& listed, const wire::Address& address) {
  if (listed == address) return true;
  const std::optional<asio::ip::tcp::endpoint> wanted = numeric_endpoint(address);
  if (!wanted || listed.port != address.port) return false;
  asio::io_context context;
  asio::ip::tcp::resolver resolver(context);
  asio::error_code error;
  const auto found = resolver.resolve(listed.host, std::to_string(listed.port), error);
  return std::any_of(found.begin(), found.end(), [&](const auto& entry) {
    return plain(entry.endpoint().address()) == plain(wanted->address());
  });
}

asio::ip::address plain(const asio::ip::address& address) {
  if (!address.is_v6() || !address.to_v6().is_v4_mapped()) return address;
  return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
}

bool same_host(const asio::ip::tcp::endpoint& local, const asio::ip::tcp::endpoint& remote) {
  return plain(remote.address()).is_loopback() || plain(local.address()) == plain(remote.address());
}

std::vector<std::string> interface_addresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {"127.0.0.1"};
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  std::vector<std::string> found;
  std::vector<std::string> loopback;
  for (const ifaddrs* item = list; item != nullptr; item = item->ifa_next) {
    if (item->ifa_addr == nullptr || (item->ifa_flags & IFF_UP) == 0) continue;
    const int family = item->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    asio::ip::tcp::endpoint endpoint;
    std::memcpy(endpoint.data(), item->ifa_addr,
                family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    const asio::ip::address address = endpoint.address();
    if (address.is_v6() && address.to_v6().is_link_local()) continue;
    auto& where = address.is_loopback() ? loopback : found;
    const std::string text = address.to_string();
    if (std::find(where.begin(), where.end(), text) == where.end()) where.push_back(text);
  }
  found.insert(found.end(), loopback.begin(), loopback.end());
  return found;
}

}  // namespace pccl::io
