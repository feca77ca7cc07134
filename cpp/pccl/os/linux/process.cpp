#include "pccl/os/process.h"

#include <sched.h>
#include <unistd.h>

#include <fstream>

namespace pccl::os {

char** environment() { return environ; }

unsigned usable_processors() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 0;
  return static_cast<unsigned>(CPU_COUNT(&allowed));
}

std::string boot_id() {
  std::string text;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::getline(file, text);
  return text;
}

}  // namespace pccl::os
