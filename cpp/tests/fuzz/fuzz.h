// Common parts of the fuzz targets: readers of a run's bytes, and assertions.
//
// A target reads a script from the bytes, so that the fuzzer changes events instead of breaking
// checksums: frames get valid checksums after they were changed.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "pccl/base/ids.h"
#include "pccl/wire/codec.h"
#include "tests/peers.h"

// One target per program: libFuzzer's main calls it.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace pccl::fuzz {

// Ends the run with a report: libFuzzer keeps the bytes that led here.
inline void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: does not hold: %s\n", what);
  std::abort();
}

// Reads values from the front; zeros once no bytes are left.
class Script {
 public:
  Script(const std::uint8_t* data, std::size_t size) : rest_(data, size) {}
  [[nodiscard]] bool empty() const { return rest_.empty(); }
  std::uint8_t byte() {
    if (rest_.empty()) return 0;
    const std::uint8_t first = rest_.front();
    rest_ = rest_.subspan(1);
    return first;
  }
  std::uint16_t pair() {
    const std::uint8_t low = byte();
    return static_cast<std::uint16_t>(low | (byte() << 8));
  }
  // A length, then this many bytes.
  std::span<const std::uint8_t> piece() {
    const std::size_t size = std::min<std::size_t>(pair(), rest_.size());
    const auto piece = rest_.first(size);
    rest_ = rest_.subspan(size);
    return piece;
  }
  std::span<const std::uint8_t> rest() const { return rest_; }

 private:
  std::span<const std::uint8_t> rest_;
};

// The inverse of Script, for seeds.
class Scribe {
 public:
  Scribe& byte(std::uint8_t value) {
    bytes_.push_back(value);
    return *this;
  }
  Scribe& pair(std::size_t value) {
    return byte(static_cast<std::uint8_t>(value)).byte(static_cast<std::uint8_t>(value >> 8));
  }
  Scribe& piece(std::span<const std::uint8_t> piece) {
    pair(piece.size());
    bytes_.insert(bytes_.end(), piece.begin(), piece.end());
    return *this;
  }
  [[nodiscard]] const wire::Bytes& bytes() const { return bytes_; }

 private:
  wire::Bytes bytes_;
};

using tests::peer;

}  // namespace pccl::fuzz
