#include "pccl/os/random.h"

#include <sys/random.h>
#include <unistd.h>

namespace pccl::os {

bool fill_random(std::span<std::uint8_t> bytes) {
  return ::getentropy(bytes.data(), bytes.size()) == 0;
}

}  // namespace pccl::os
