// Connections whose other end has not said yet who it is: how many there may be, how much they may
// have sent, and which has to go when it is too much. No sockets, no clock.
//
// Who only connects and says nothing must not keep those out who would. So nobody new is refused:
// the oldest makes room, of the address that has too many, or of the one that has the most.
#pragma once

#include <array>
#include <asio/ip/address.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

namespace pccl::io {

// At most so many wait at one listener (fewer where a process may have few descriptors: a quarter
// of them), and so many from one address: as many as one link has stripes, which are dialled
// together.
inline constexpr std::size_t kMaxWaiting = 1024;
inline constexpr std::size_t kMaxWaitingFromOne = 256;
// What all of them together may have sent that is not a whole message yet. One message may be 1
// MiB.
inline constexpr std::size_t kMaxWaitingBytes = 64 << 20;

// kMaxWaiting, or less on a process with few descriptors.
[[nodiscard]] std::size_t waiting_limit();

// *one thread*
class Anteroom {
 public:
  explicit Anteroom(std::size_t most = kMaxWaiting, std::size_t most_from_one = kMaxWaitingFromOne,
                    std::size_t most_bytes = kMaxWaitingBytes)
      : most_(most), most_from_one_(most_from_one), most_bytes_(most_bytes) {}

  // REQUIRES: ids grow.
  void enter(std::uint64_t id, const asio::ip::address& from);
  // It has sent so many bytes that are no whole message yet.
  void holds(std::uint64_t id, std::size_t bytes);
  // Who has to go, if it is too much. To be asked after each of these, until it is nobody.
  [[nodiscard]] std::optional<std::uint64_t> crowded() const;
  // Who has to go if there is no room for even one more; nobody if nobody is in here.
  [[nodiscard]] std::optional<std::uint64_t> first_out() const;
  // It has said who it is, or is gone. Nothing happens if it is not in here.
  void leave(std::uint64_t id);
  [[nodiscard]] std::size_t size() const { return inside_.size(); }
  [[nodiscard]] bool contains(std::uint64_t id) const { return inside_.contains(id); }

 private:
  // An IPv4 address, or the first half of an IPv6 one: whoever has one of those has all of them.
  using Origin = std::array<std::uint8_t, 9>;
  struct From {
    std::map<std::uint64_t, std::size_t> bytes;  // by id
    std::size_t total = 0;
  };
  using Origins = std::map<Origin, From>;
  static Origin origin_of(const asio::ip::address& address);
  // Where several have as many, whoever has waited longest goes: not always the same address.
  static std::uint64_t oldest(const Origins::value_type& origin);
  // The address with the most connections. REQUIRES: somebody is in here.
  [[nodiscard]] Origins::const_iterator fullest() const;

  std::size_t most_;
  std::size_t most_from_one_;
  std::size_t most_bytes_;
  std::size_t bytes_ = 0;
  std::map<std::uint64_t, Origin> inside_;
  Origins origins_;
};

}  // namespace pccl::io
