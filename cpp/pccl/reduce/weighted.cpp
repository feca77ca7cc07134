#include "pccl/reduce/weighted.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "pccl/reduce/quantize.h"
#include "pccl/reduce/reduce.h"

// The arrays may be the same memory; iterations are independent even so.
#if defined(__clang__)
#define PCCL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PCCL_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace pccl::reduce {
namespace {

// An integer mean this close to a whole number is that number.
constexpr double kWhole = 1e-9;
constexpr double kWholeRelative = 0x1p-48;

constexpr std::size_t kBlock = 2048;  // elements converted at once, in cache

template <class T>
T load(const void* from, std::size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store(void* to, std::size_t i, T value) {
  std::memcpy(static_cast<char*>(to) + i * sizeof(T), &value, sizeof(T));
}

template <class T, class Product>
void scale_all(const void* values, double weight, void* products, std::size_t count) {
  const auto factor = static_cast<Product>(weight);
  PCCL_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i)
    store<Product>(products, i, static_cast<Product>(load<T>(values, i)) * factor);
}

// Floats of 8 and 16 bits are widened by the kernels, which have instructions for some.
void scale_small(DataType dtype, const void* values, double weight, void* products,
                 std::size_t count) {
  const std::size_t size = element_size(dtype);
  float block[kBlock];
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t n = std::min(kBlock, count - first);
    reduce(dtype, ReduceOp::sum, static_cast<const char*>(values) + size * first, {}, 0, block, n);
    scale_all<float, float>(block, weight, static_cast<char*>(products) + 4 * first, n);
  }
}

template <class Visitor>
void visit_integer(DataType dtype, const Visitor& visitor) {
  switch (dtype) {
    case DataType::uint8:
      return visitor(std::uint8_t{});
    case DataType::int8:
      return visitor(std::int8_t{});
    case DataType::int16:
      return visitor(std::int16_t{});
    case DataType::uint16:
      return visitor(std::uint16_t{});
    case DataType::uint32:
      return visitor(std::uint32_t{});
    case DataType::int32:
      return visitor(std::int32_t{});
    case DataType::uint64:
      return visitor(std::uint64_t{});
    case DataType::int64:
      return visitor(std::int64_t{});
    default:
      return;
  }
}

template <class T>
void divide(const void* sums, double total, void* means, std::size_t count) {
  PCCL_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i)
    store<T>(means, i, static_cast<T>(static_cast<double>(load<T>(sums, i)) / total));
}

// Rounds to the nearest whole number, ties to even. From 2^52 on, every double is whole.
double nearest(double value) {
  const double magic = std::bit_cast<double>((std::bit_cast<std::uint64_t>(value) & (1ULL << 63)) |
                                             std::bit_cast<std::uint64_t>(0x1p52));
  const double rounded = (value + magic) - magic;
  const double magnitude = value < 0 ? -value : value;
  return magnitude < 0x1p52 ? rounded : value;
}

// The largest double that T can represent.
template <class T>
constexpr double largest() {
  constexpr T most = std::numeric_limits<T>::max();
  if constexpr (sizeof(T) == 8) return static_cast<double>(most - (most >> 53));
  return static_cast<double>(most);
}

template <class T>
void divide_integers(const void* sums, double total, void* means, std::size_t count) {
  constexpr auto kLeast = static_cast<double>(std::numeric_limits<T>::min());
  constexpr double kMost = largest<T>();
  PCCL_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    const double quotient = load<double>(sums, i) / total;
    const double magnitude = quotient < 0 ? -quotient : quotient;
    const double whole = nearest(quotient);
    const double off = quotient < whole ? whole - quotient : quotient - whole;
    const double up = whole < 0 ? -whole : whole;  // the magnitude of the rounded quotient
    const double toward_zero = up > magnitude ? whole - (quotient < 0 ? -1.0 : 1.0) : whole;
    const double mean = off <= kWhole + magnitude * kWholeRelative ? whole : toward_zero;
    const double above = mean > kLeast ? mean : kLeast;  // also for NaN
    store<T>(means, i, static_cast<T>(above < kMost ? above : kMost));
  }
}

// float64 as float16 in one rounding, nearest, ties to even.
std::uint16_t to_half(double value) {
  constexpr auto bits_of = [](double number) { return std::bit_cast<std::uint64_t>(number); };
  const std::uint64_t bits = bits_of(value);
  const std::uint64_t magnitude = bits & ~(1ULL << 63);
  const std::uint64_t sign = (bits >> 48) & 0x8000U;
  // Below the smallest normal half, adding 2^28 leaves the rounded multiple of 2^-24 in the low
  // bits.
  const std::uint64_t small = bits_of(std::bit_cast<double>(magnitude) + 0x1p28) - bits_of(0x1p28);
  const std::uint64_t odd = (magnitude >> 42) & 1U;  // the exponents' biases are 15 and 1023
  const std::uint64_t normal = (magnitude - (1008ULL << 52) + (1ULL << 41) - 1 + odd) >> 42;
  const std::uint64_t finite = magnitude < bits_of(0x1p-14) ? small : normal;
  const std::uint64_t special =
      magnitude > bits_of(std::numeric_limits<double>::infinity()) ? 0x7e00U : 0x7c00U;
  return static_cast<std::uint16_t>((magnitude >= bits_of(0x1p16) ? special : finite) | sign);
}

void divide_to_halves(const void* sums, double total, void* means, std::size_t count) {
  PCCL_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i)
    store<std::uint16_t>(means, i, to_half(static_cast<double>(load<float>(sums, i)) / total));
}

// In two roundings.
void divide_to_small(DataType dtype, const void* sums, double total, void* means,
                     std::size_t count) {
  const std::size_t size = element_size(dtype);
  float block[kBlock];
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t n = std::min(kBlock, count - first);
    divide<float>(static_cast<const char*>(sums) + 4 * first, total, block, n);
    fit(dtype, block, static_cast<char*>(means) + size * first, n);
  }
}

}  // namespace

double as_weight(double number) {
  const bool fits = number == 0 || (number >= kLeastWeight && number <= kMostWeight);
  return fits ? number : std::numeric_limits<double>::quiet_NaN();
}

void scale(DataType dtype, const void* values, double weight, void* products, std::size_t count) {
  if (!(weight > 0)) {
    if (count != 0) std::memset(products, 0, count * element_size(product_type(dtype)));
    return;
  }
  switch (dtype) {
    case DataType::float16:
    case DataType::bfloat16:
    case DataType::float8_e4m3fn:
    case DataType::float8_e5m2:
      return scale_small(dtype, values, weight, products, count);
    case DataType::float32:
      return scale_all<float, float>(values, weight, products, count);
    case DataType::float64:
      return scale_all<double, double>(values, weight, products, count);
    case DataType::complex64:
      return scale_all<float, float>(values, weight, products, 2 * count);
    case DataType::complex128:
      return scale_all<double, double>(values, weight, products, 2 * count);
    default:
      return visit_integer(dtype, [&](auto like) {
        scale_all<decltype(like), double>(values, weight, products, count);
      });
  }
}

void unscale(DataType dtype, const void* sums, double total, void* means, std::size_t count) {
  switch (dtype) {
    case DataType::float16:
      return divide_to_halves(sums, total, means, count);
    case DataType::bfloat16:
    case DataType::float8_e4m3fn:
    case DataType::float8_e5m2:
      return divide_to_small(dtype, sums, total, means, count);
    case DataType::float32:
      return divide<float>(sums, total, means, count);
    case DataType::float64:
      return divide<double>(sums, total, means, count);
    case DataType::complex64:
      return divide<float>(sums, total, means, 2 * count);
    case DataType::complex128:
      return divide<double>(sums, total, means, 2 * count);
    default:
      return visit_integer(
          dtype, [&](auto like) { divide_integers<decltype(like)>(sums, total, means, count); });
  }
}

}  // namespace pccl::reduce
