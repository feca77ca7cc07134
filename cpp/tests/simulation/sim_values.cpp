// Elements of simulated arrays: whole numbers as bytes, and back.
#include <cmath>
#include <cstring>

#include "tests/simulation/sim_world.h"

namespace pccl::simulation {
namespace {

// Appends a whole number as an element. Sums of eight are exact in every type.
void put(wire::Bytes& out, DataType dtype, std::int64_t value) {
  const auto raw = [&](const auto number) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&number);
    out.insert(out.end(), bytes, bytes + sizeof number);
  };
  switch (dtype) {
    case DataType::int8:
      return raw(static_cast<std::int8_t>(value));
    case DataType::int32:
      return raw(static_cast<std::int32_t>(value));
    case DataType::int64:
      return raw(value);
    case DataType::float32:
      return raw(static_cast<float>(value));
    case DataType::float64:
      return raw(static_cast<double>(value));
    case DataType::float16: {
      // Exact for |value| <= 2048.
      std::uint32_t bits = value < 0 ? 0x8000 : 0;
      auto left = static_cast<std::uint32_t>(value < 0 ? -value : value);
      if (left != 0) {
        std::uint32_t exponent = 25;
        while (left < 0x400) {
          left <<= 1;
          --exponent;
        }
        while (left > 0x7ff) {
          left >>= 1;
          ++exponent;
        }
        bits |= (exponent << 10) | (left & 0x3ff);
      }
      return raw(static_cast<std::uint16_t>(bits));
    }
    default:
      return;
  }
}

}  // namespace

wire::Bytes to_bytes(DataType dtype, const std::vector<std::int64_t>& values) {
  wire::Bytes bytes;
  bytes.reserve(values.size() * 8);
  for (const std::int64_t value : values) put(bytes, dtype, value);
  return bytes;
}

std::vector<double> to_numbers(DataType dtype, const wire::Bytes& bytes) {
  const std::size_t element = element_size(dtype);
  std::vector<double> numbers;
  for (std::size_t at = 0; at + element <= bytes.size(); at += element) {
    if (dtype == DataType::float32) {
      float value = 0;
      std::memcpy(&value, bytes.data() + at, element);
      numbers.push_back(value);
      continue;
    }
    std::uint16_t bits = 0;  // float16
    std::memcpy(&bits, bytes.data() + at, element);
    const int exponent = (bits >> 10) & 0x1f;
    const double mantissa = (bits & 0x3ff) / 1024.0;
    const double magnitude = exponent == 0    ? std::ldexp(mantissa, -14)
                             : exponent == 31 ? HUGE_VAL
                                              : std::ldexp(1 + mantissa, exponent - 15);
    numbers.push_back((bits & 0x8000) != 0 ? -magnitude : magnitude);
  }
  return numbers;
}

}  // namespace pccl::simulation
