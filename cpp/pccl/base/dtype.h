// Element types and reduction operators. Values are those of the explicit API's enums
// (docs/guide/from-pypccl.md).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace pccl {

// Elements travel as the bytes that are in memory, and nothing on the wire names their order.
static_assert(std::endian::native == std::endian::little,
              "pccl needs a little-endian processor: members exchange elements as they are in "
              "memory, so one of another byte order would give them wrong numbers");

enum class DataType : std::uint8_t {
  uint8 = 0,
  int8 = 1,
  int16 = 2,
  uint16 = 3,
  uint32 = 4,
  int32 = 5,
  uint64 = 6,
  int64 = 7,
  float16 = 8,
  bfloat16 = 9,
  float32 = 10,
  float64 = 11,
  boolean = 12,        // one byte, 0 or 1
  float8_e4m3fn = 13,  // 4 bits of exponent, 3 of mantissa; no infinities
  float8_e5m2 = 14,    // the upper half of a float16
  complex64 = 15,      // two float32: the real part, the imaginary part
  complex128 = 16,     // two float64
};
inline constexpr std::uint8_t kDataTypeCount = 17;

enum class ReduceOp : std::uint8_t { sum = 0, avg = 1, prod = 2, max = 3, min = 4 };
inline constexpr std::uint8_t kReduceOpCount = 5;

[[nodiscard]] constexpr std::size_t element_size(DataType type) {
  switch (type) {
    case DataType::uint8:
    case DataType::int8:
    case DataType::boolean:
    case DataType::float8_e4m3fn:
    case DataType::float8_e5m2:
      return 1;
    case DataType::int16:
    case DataType::uint16:
    case DataType::float16:
    case DataType::bfloat16:
      return 2;
    case DataType::uint32:
    case DataType::int32:
    case DataType::float32:
      return 4;
    case DataType::int64:
    case DataType::uint64:
    case DataType::float64:
    case DataType::complex64:
      return 8;
    case DataType::complex128:
      return 16;
  }
  return 0;  // no such type
}

// Whether elements of the type can be combined so. Booleans have an order (max is "or", min is
// "and") and no sum; complex numbers have sums and no order.
[[nodiscard]] constexpr bool combines(DataType type, ReduceOp op) {
  switch (type) {
    case DataType::boolean:
      return op == ReduceOp::max || op == ReduceOp::min;
    case DataType::complex64:
    case DataType::complex128:
      return op == ReduceOp::sum || op == ReduceOp::avg;
    default:
      return true;
  }
}

// The type of partial results: float32 for 8-bit and 16-bit floats, 64-bit integers for integers
// under avg (see accumulation_size for elements of 64 bits), otherwise the element type.
[[nodiscard]] constexpr DataType accumulation_type(DataType type, ReduceOp op) {
  switch (type) {
    case DataType::float16:
    case DataType::bfloat16:
    case DataType::float8_e4m3fn:
    case DataType::float8_e5m2:
      return DataType::float32;
    case DataType::float32:
    case DataType::float64:
    case DataType::boolean:
    case DataType::complex64:
    case DataType::complex128:
      return type;
    case DataType::uint8:
    case DataType::uint16:
    case DataType::uint32:
    case DataType::uint64:
      return op == ReduceOp::avg ? DataType::uint64 : type;
    case DataType::int8:
    case DataType::int16:
    case DataType::int32:
    case DataType::int64:
      return op == ReduceOp::avg ? DataType::int64 : type;
  }
  return type;  // no such type
}

// Bytes of one element of a partial result. Under avg, 64-bit integers are summed in 128 bits: the
// sum may exceed 64 bits although the mean does not.
[[nodiscard]] constexpr std::size_t accumulation_size(DataType type, ReduceOp op) {
  const bool widest = type == DataType::int64 || type == DataType::uint64;
  return widest && op == ReduceOp::avg ? 16 : element_size(accumulation_type(type, op));
}

[[nodiscard]] const char* name(DataType type);  // "float32"
[[nodiscard]] const char* name(ReduceOp op);    // "sum"

}  // namespace pccl
