// Ids of peers, for tests.
#pragma once

#include <cstdint>

#include "pccl/base/ids.h"

namespace pccl::tests {

// 0: no peer.
inline PeerId peer(std::uint8_t number) {
  PeerId id;
  id.bytes.fill(number);
  return id;
}

}  // namespace pccl::tests
