#include "pccl/io/congestion.h"

#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <optional>
#include <sstream>
#include <system_error>

#include "pccl/base/fork.h"
#include "pccl/os/socket.h"
#include "pccl/os/tcp.h"

namespace pccl::io {
namespace {

constexpr const char* kBbr = "bbr";
// On shorter paths losses are mended soon, and the system's choice is for the data centre.
constexpr Duration kLong = std::chrono::milliseconds(5);

// Whether connections may use it: an error if not.
Status check(const std::string& name) {
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

// Setting one that the kernel has not loaded would load it, if a privileged process does.
bool loaded(const std::string& name) {
  std::istringstream names(os::congestion_controls());
  for (std::string one; names >> one;)
    if (one == name) return true;
  return false;
}

}  // namespace

Result<Congestion> Congestion::make(const std::string& setting) {
  if (setting == kSystems) return Congestion({}, {});
  if (!setting.empty()) {
    if (const Status works = check(setting); !works) return works.error();
    return Congestion(setting, {});
  }
  const bool works = loaded(kBbr) && check(kBbr);
  return Congestion(works ? kBbr : "", kLong);
}

void Congestion::choose(int descriptor) const {
  if (name_.empty()) return;
  if (shortest_ > Duration{}) {
    const std::optional<os::TcpStatistics> known = os::tcp_statistics(descriptor);
    if (!known || known->least_rtt < shortest_) return;
  }
  (void)os::set_congestion_control(descriptor, name_);
}

bool Congestion::paces() const { return name_.starts_with(kBbr); }

}  // namespace pccl::io
