#include "pccl/os/processor.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace pccl::os {

bool has_aes() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
  constexpr unsigned long kBoth = HWCAP_AES | HWCAP_PMULL;
  return (::getauxval(AT_HWCAP) & kBoth) == kBoth;
#else
  return false;
#endif
}

}  // namespace pccl::os
