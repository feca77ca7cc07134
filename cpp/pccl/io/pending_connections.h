// Connections whose other end has not identified itself: how many there may be, how many bytes they
// may hold, and which to close when there are too many. No sockets, no clock.
//
// A client that connects and stays silent must not keep others out. So a new connection is never
// refused: the oldest one is closed, from the address that exceeds its limit, or else from the
// address that has the most.
#pragma once

#include <asio/ip/address.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace pccl::io {

// Limits for one listener.
inline constexpr std::size_t kMaxPending = 1024;
// A link has up to 256 stripes, which are dialled together.
inline constexpr std::size_t kMaxPendingFromOne = 256;
// Bytes of incomplete messages, for all connections together. One message may have 1 MiB.
inline constexpr std::size_t kMaxPendingBytes = 64 << 20;

// `most`, or a quarter of the descriptors that this process may open, if that is less.
[[nodiscard]] std::size_t descriptor_share(std::size_t most);

// *one thread*
class PendingConnections {
 public:
  explicit PendingConnections(std::size_t most = kMaxPending,
                              std::size_t most_from_one = kMaxPendingFromOne,
                              std::size_t most_bytes = kMaxPendingBytes)
      : most_(most), most_from_one_(most_from_one), most_bytes_(most_bytes) {}

  // REQUIRES: ids grow.
  void add(std::uint64_t id, const asio::ip::address& from);
  // The connection holds so many bytes of an incomplete message.
  void set_bytes(std::uint64_t id, std::size_t bytes);
  // The connection to close when a limit is exceeded. Call after add and set_bytes, until there is
  // none.
  [[nodiscard]] std::optional<std::uint64_t> over_limit() const;
  // The connection to close when no more can be opened; none if none is pending.
  [[nodiscard]] std::optional<std::uint64_t> first_out() const;
  // It has identified itself, or is closed. Ignores unknown ids.
  void remove(std::uint64_t id);
  [[nodiscard]] std::size_t size() const { return pending_.size(); }
  [[nodiscard]] bool contains(std::uint64_t id) const { return pending_.contains(id); }
  // REQUIRES: contains(id).
  [[nodiscard]] std::string address(std::uint64_t id) const;

 private:
  struct From {
    std::map<std::uint64_t, std::size_t> bytes;  // by id
    std::size_t total = 0;
  };
  using Origins = std::map<asio::ip::address, From>;
  // An IPv4 address, or an IPv6 address without its lower half, since a host may have all of that
  // half.
  static asio::ip::address origin_of(const asio::ip::address& address);
  static std::uint64_t oldest(const Origins::value_type& origin);
  // The origin with the most connections; of several, the one whose oldest has waited longest.
  // REQUIRES: size() > 0.
  [[nodiscard]] Origins::const_iterator fullest() const;

  std::size_t most_;
  std::size_t most_from_one_;
  std::size_t most_bytes_;
  std::size_t bytes_ = 0;
  std::map<std::uint64_t, asio::ip::address> pending_;
  Origins origins_;
};

}  // namespace pccl::io
