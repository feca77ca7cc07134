#include "pccl/os/processor.h"

namespace pccl::os {

bool has_aes() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__APPLE__)
  return true;  // every processor that Apple has made for 64-bit ARM
#else
  return false;
#endif
}

}  // namespace pccl::os
