#include "pccl/io/tcp_info.h"

#include <linux/tcp.h>  // and not <netinet/tcp.h>, whose tcp_info ends before what is read here
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <fstream>
#include <system_error>

#include "pccl/base/fork.h"

namespace pccl::io {

std::optional<TcpInfo> tcp_info(int descriptor) {
  ::tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return std::nullopt;
  if (size < offsetof(::tcp_info, tcpi_sndbuf_limited) + sizeof info.tcpi_sndbuf_limited)
    return std::nullopt;
  const auto us = [](std::uint64_t count) {
    return Duration(std::chrono::microseconds(static_cast<std::int64_t>(count)));
  };
  return TcpInfo{us(info.tcpi_min_rtt), us(info.tcpi_busy_time), us(info.tcpi_sndbuf_limited),
                 us(info.tcpi_rwnd_limited)};
}

Status check_congestion_control(const std::string& name) {
  const int descriptor =
      open_descriptor([] { return ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, IPPROTO_TCP); });
  if (descriptor < 0) return Status(Code::internal_error, std::generic_category().message(errno));
  const bool works = ::setsockopt(descriptor, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                                  static_cast<socklen_t>(name.size())) == 0;
  const int number = works ? 0 : errno;
  close_descriptor(descriptor);
  if (works) return {};
  std::ifstream known("/proc/sys/net/ipv4/tcp_available_congestion_control");
  std::string names;
  std::getline(known, names);
  return Status(Code::invalid_argument, "PCCL_TCP_CONGESTION=\"" + name.substr(0, 64) +
                                            "\": " + std::generic_category().message(number) +
                                            (names.empty() ? "" : "; there are: " + names));
}

void set_congestion_control(int descriptor, const std::string& name) {
  (void)::setsockopt(descriptor, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                     static_cast<socklen_t>(name.size()));
}

}  // namespace pccl::io
