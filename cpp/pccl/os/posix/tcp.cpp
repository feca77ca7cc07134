#include "pccl/os/tcp.h"

#include <cerrno>

namespace pccl::os {

std::optional<TcpStatistics> tcp_statistics(int) { return std::nullopt; }

int set_congestion_control(int, const std::string&) { return ENOTSUP; }

std::string congestion_controls() { return {}; }

}  // namespace pccl::os
