#include "pccl/base/ids.h"

#include <random>

#include "pccl/os/random.h"

namespace pccl {

namespace {

std::string digits(const std::array<std::uint8_t, 16>& bytes, std::size_t count) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * count);
  for (std::size_t i = 0; i < count; ++i) {
    text.push_back(kDigits[bytes[i] >> 4]);
    text.push_back(kDigits[bytes[i] & 15]);
  }
  return text;
}

}  // namespace

std::string PeerId::hex() const { return digits(bytes, bytes.size()); }

std::string PeerId::brief() const { return digits(bytes, 4); }

PeerId PeerId::random() {
  PeerId id;
  // All zero means no peer.
  while (id.empty()) {
    if (os::fill_random(id.bytes)) continue;
    // Relay tokens are made here too and must not be guessable.
    std::random_device device;
    for (std::uint8_t& byte : id.bytes) byte = static_cast<std::uint8_t>(device());
  }
  return id;
}

}  // namespace pccl
