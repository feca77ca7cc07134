#include "pccl/os/tcp.h"

#include <linux/tcp.h>  // and not <netinet/tcp.h>, whose tcp_info ends before what is read here
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>

namespace pccl::os {

std::optional<TcpStatistics> tcp_statistics(int descriptor) {
  ::tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return std::nullopt;
  if (size < offsetof(::tcp_info, tcpi_sndbuf_limited) + sizeof info.tcpi_sndbuf_limited)
    return std::nullopt;
  const auto us = [](std::uint64_t count) {
    return std::chrono::microseconds(static_cast<std::int64_t>(count));
  };
  // The kernel's value before there is a measurement.
  const bool measured = info.tcpi_min_rtt != std::numeric_limits<std::uint32_t>::max();
  return TcpStatistics{us(measured ? info.tcpi_min_rtt : 0), us(info.tcpi_busy_time),
                       us(info.tcpi_sndbuf_limited), us(info.tcpi_rwnd_limited)};
}

int set_congestion_control(int descriptor, const std::string& name) {
  const bool works = ::setsockopt(descriptor, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                                  static_cast<socklen_t>(name.size())) == 0;
  return works ? 0 : errno;
}

std::string congestion_controls() {
  std::ifstream known("/proc/sys/net/ipv4/tcp_available_congestion_control");
  std::string names;
  std::getline(known, names);
  return names;
}

}  // namespace pccl::os
