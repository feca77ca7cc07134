#include "pccl/io/anteroom.h"

#include <sys/resource.h>

#include <algorithm>

#include "pccl/io/address.h"

namespace pccl::io {

std::size_t waiting_limit() {
  rlimit descriptors{};
  if (::getrlimit(RLIMIT_NOFILE, &descriptors) != 0 || descriptors.rlim_cur == RLIM_INFINITY)
    return kMaxWaiting;
  return std::clamp<std::size_t>(descriptors.rlim_cur / 4, 1, kMaxWaiting);
}

Anteroom::Origin Anteroom::origin_of(const asio::ip::address& address) {
  Origin origin{};
  const asio::ip::address seen = plain(address);
  if (seen.is_v4()) {
    const auto bytes = seen.to_v4().to_bytes();
    origin[0] = 4;
    std::copy(bytes.begin(), bytes.end(), origin.begin() + 1);
  } else {
    const auto bytes = seen.to_v6().to_bytes();
    origin[0] = 6;
    std::copy_n(bytes.begin(), 8, origin.begin() + 1);
  }
  return origin;
}

void Anteroom::enter(std::uint64_t id, const asio::ip::address& from) {
  const Origin origin = origin_of(from);
  inside_[id] = origin;
  origins_[origin].bytes[id] = 0;
}

void Anteroom::holds(std::uint64_t id, std::size_t bytes) {
  const auto it = inside_.find(id);
  if (it == inside_.end()) return;
  From& here = origins_.at(it->second);
  std::size_t& held = here.bytes.at(id);
  bytes_ = bytes_ - held + bytes;
  here.total = here.total - held + bytes;
  held = bytes;
}

std::uint64_t Anteroom::oldest(const Origins::value_type& origin) {
  return origin.second.bytes.begin()->first;
}

Anteroom::Origins::const_iterator Anteroom::fullest() const {
  return std::max_element(origins_.begin(), origins_.end(), [](const auto& a, const auto& b) {
    return a.second.bytes.size() != b.second.bytes.size()
               ? a.second.bytes.size() < b.second.bytes.size()
               : oldest(a) > oldest(b);
  });
}

std::optional<std::uint64_t> Anteroom::first_out() const {
  if (origins_.empty()) return std::nullopt;
  return oldest(*fullest());
}

std::optional<std::uint64_t> Anteroom::crowded() const {
  if (bytes_ > most_bytes_) {
    const auto most =
        std::max_element(origins_.begin(), origins_.end(), [](const auto& a, const auto& b) {
          return a.second.total != b.second.total ? a.second.total < b.second.total
                                                  : oldest(a) > oldest(b);
        });
    // The oldest that has sent anything: others give nothing back.
    const auto& guests = most->second.bytes;
    return std::find_if(guests.begin(), guests.end(),
                        [](const auto& guest) { return guest.second > 0; })
        ->first;
  }
  if (inside_.size() <= std::min(most_, most_from_one_)) return std::nullopt;
  const auto most = fullest();
  if (inside_.size() <= most_ && most->second.bytes.size() <= most_from_one_) return std::nullopt;
  return oldest(*most);
}

void Anteroom::leave(std::uint64_t id) {
  const auto it = inside_.find(id);
  if (it == inside_.end()) return;
  const auto origin = origins_.find(it->second);
  const auto held = origin->second.bytes.find(id);
  bytes_ -= held->second;
  origin->second.total -= held->second;
  origin->second.bytes.erase(held);
  if (origin->second.bytes.empty()) origins_.erase(origin);
  inside_.erase(it);
}

}  // namespace pccl::io
