#include "pccl/os/process.h"

#if defined(__APPLE__)
#include <crt_externs.h>
#include <sys/sysctl.h>
#else
extern "C" char** environ;  // NOLINT: POSIX has it in no header
#endif

#include <array>
#include <cstddef>
#include <thread>

namespace pccl::os {

#if defined(__APPLE__)
// Only programs have `environ` there.
char** environment() { return *::_NSGetEnviron(); }

std::string boot_id() {
  std::array<char, 64> text{};
  std::size_t size = text.size() - 1;
  if (::sysctlbyname("kern.bootsessionuuid", text.data(), &size, nullptr, 0) != 0) return {};
  return text.data();
}
#else
char** environment() { return ::environ; }

std::string boot_id() { return {}; }
#endif

unsigned usable_processors() { return std::thread::hardware_concurrency(); }

}  // namespace pccl::os
