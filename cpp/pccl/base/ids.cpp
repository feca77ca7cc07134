#include "pccl/base/ids.h"

#include <random>

#include "pccl/os/random.h"

namespace pccl {

std::string hex_digits(const Bytes16& bytes, std::size_t count) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * count);
  for (std::size_t i = 0; i < count; ++i) {
    text.push_back(kDigits[bytes[i] >> 4]);
    text.push_back(kDigits[bytes[i] & 15]);
  }
  return text;
}

Bytes16 random_bytes16() {
  Bytes16 bytes{};
  while (bytes == Bytes16{}) {
    if (os::fill_random(bytes)) continue;
    std::random_device device;
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(device());
  }
  return bytes;
}

}  // namespace pccl
