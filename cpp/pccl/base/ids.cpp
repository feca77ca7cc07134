#include "pccl/base/ids.h"

#include <sys/random.h>

#include <cerrno>
#include <random>

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

// Fills `bytes` with random bytes. False only where the kernel or a sandbox has no getrandom.
bool fill_from_kernel(std::array<std::uint8_t, 16>& bytes) {
  std::size_t filled = 0;
  while (filled < bytes.size()) {
    const ssize_t got = ::getrandom(bytes.data() + filled, bytes.size() - filled, 0);
    if (got > 0) {
      filled += static_cast<std::size_t>(got);
    } else if (got == 0 || errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::string PeerId::hex() const { return digits(bytes, bytes.size()); }

std::string PeerId::brief() const { return digits(bytes, 4); }

PeerId PeerId::random() {
  PeerId id;
  // All zero means no peer.
  while (id.empty()) {
    if (fill_from_kernel(id.bytes)) continue;
    // Relay tokens are made here too and must not be guessable.
    std::random_device device;
    for (std::uint8_t& byte : id.bytes) byte = static_cast<std::uint8_t>(device());
  }
  return id;
}

}  // namespace pccl
