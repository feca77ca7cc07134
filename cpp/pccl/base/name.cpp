#include "pccl/base/name.h"

#include <unistd.h>

#include <algorithm>
#include <array>

namespace pccl {
namespace {

bool printable(char c) { return c > ' ' && c <= '~'; }

}  // namespace

bool valid_name(std::string_view name) {
  return !name.empty() && name.size() <= kMaxName && std::ranges::all_of(name, printable);
}

std::string default_name() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  std::string name = host.data();
  if (name.empty()) name = "peer";
  std::ranges::replace_if(
      name, [](char c) { return !printable(c); }, '-');
  const std::string pid = "-" + std::to_string(::getpid());
  name.resize(std::min(name.size(), kMaxName - pid.size()));
  return name + pid;
}

}  // namespace pccl
