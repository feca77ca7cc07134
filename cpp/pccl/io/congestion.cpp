#include "pccl/io/congestion.h"

#include <sys/socket.h>

#include <cerrno>
#include <system_error>

#include "pccl/base/fork.h"
#include "pccl/os/socket.h"
#include "pccl/os/tcp.h"

namespace pccl::io {

Status check_congestion_control(const std::string& name) {
  const int descriptor = open_descriptor([] { return os::open_stream(AF_INET); });
  if (descriptor < 0) return Status(Code::internal_error, std::generic_category().message(errno));
  const int error = os::set_congestion_control(descriptor, name);
  close_descriptor(descriptor);
  if (error == 0) return {};
  const std::string names = os::congestion_controls();
  return Status(Code::invalid_argument, "PCCL_TCP_CONGESTION=\"" + name.substr(0, 64) +
                                            "\": " + std::generic_category().message(error) +
                                            (names.empty() ? "" : "; there are: " + names));
}

}  // namespace pccl::io
