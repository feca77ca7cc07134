#include "pccl/digest/ticket.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>

namespace pccl::digest {

Seal seal_of(const Ticket& ticket) {
  std::array<std::uint8_t, 32> digest{};
  unsigned size = 0;
  const int done = EVP_Digest(ticket.bytes.data(), ticket.bytes.size(), digest.data(), &size,
                              EVP_sha256(), nullptr);
  if (done != 1 || size != digest.size()) throw std::runtime_error("SHA-256 failed");
  Seal seal;
  std::copy_n(digest.begin(), seal.bytes.size(), seal.bytes.begin());
  return seal;
}

}  // namespace pccl::digest
