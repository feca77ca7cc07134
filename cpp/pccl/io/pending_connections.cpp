#include "pccl/io/pending_connections.h"

#include <sys/resource.h>

#include <algorithm>

#include "pccl/io/address.h"

namespace pccl::io {

std::size_t descriptor_share(std::size_t most) {
  rlimit descriptors{};
  if (::getrlimit(RLIMIT_NOFILE, &descriptors) != 0 || descriptors.rlim_cur == RLIM_INFINITY)
    return most;
  return std::clamp(static_cast<std::size_t>(descriptors.rlim_cur) / 4, std::size_t{1}, most);
}

asio::ip::address PendingConnections::origin_of(const asio::ip::address& address) {
  const asio::ip::address seen = plain(address);
  if (seen.is_v4()) return seen;
  auto bytes = seen.to_v6().to_bytes();
  std::fill(bytes.begin() + 8, bytes.end(), std::uint8_t{0});
  return asio::ip::address_v6(bytes);
}

void PendingConnections::add(std::uint64_t id, const asio::ip::address& from) {
  pending_[id] = from;
  origins_[origin_of(from)].bytes[id] = 0;
}

std::string PendingConnections::address(std::uint64_t id) const {
  return plain(pending_.at(id)).to_string();
}

void PendingConnections::set_bytes(std::uint64_t id, std::size_t bytes) {
  const auto it = pending_.find(id);
  if (it == pending_.end()) return;
  From& here = origins_.at(origin_of(it->second));
  std::size_t& held = here.bytes.at(id);
  bytes_ = bytes_ - held + bytes;
  here.total = here.total - held + bytes;
  held = bytes;
}

std::uint64_t PendingConnections::oldest(const Origins::value_type& origin) {
  return origin.second.bytes.begin()->first;
}

PendingConnections::Origins::const_iterator PendingConnections::fullest() const {
  return std::max_element(origins_.begin(), origins_.end(), [](const auto& a, const auto& b) {
    return a.second.bytes.size() != b.second.bytes.size()
               ? a.second.bytes.size() < b.second.bytes.size()
               : oldest(a) > oldest(b);
  });
}

std::optional<std::uint64_t> PendingConnections::first_out() const {
  if (origins_.empty()) return std::nullopt;
  return oldest(*fullest());
}

std::optional<std::uint64_t> PendingConnections::over_limit() const {
  if (bytes_ > most_bytes_) {
    const auto most =
        std::max_element(origins_.begin(), origins_.end(), [](const auto& a, const auto& b) {
          return a.second.total != b.second.total ? a.second.total < b.second.total
                                                  : oldest(a) > oldest(b);
        });
    // The oldest that holds any bytes: closing another would free nothing.
    const auto& held = most->second.bytes;
    return std::find_if(held.begin(), held.end(), [](const auto& one) { return one.second > 0; })
        ->first;
  }
  if (pending_.size() <= std::min(most_, most_from_one_)) return std::nullopt;
  const auto most = fullest();
  if (pending_.size() <= most_ && most->second.bytes.size() <= most_from_one_) return std::nullopt;
  return oldest(*most);
}

void PendingConnections::remove(std::uint64_t id) {
  const auto it = pending_.find(id);
  if (it == pending_.end()) return;
  const auto origin = origins_.find(origin_of(it->second));
  const auto held = origin->second.bytes.find(id);
  bytes_ -= held->second;
  origin->second.total -= held->second;
  origin->second.bytes.erase(held);
  if (origin->second.bytes.empty()) origins_.erase(origin);
  pending_.erase(it);
}

}  // namespace pccl::io
