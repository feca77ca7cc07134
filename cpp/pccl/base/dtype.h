// Element types and reduction operators. Values are those of the explicit API's enums
// (docs/guide/from-pypccl.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace pccl {

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
};
inline constexpr std::uint8_t kDataTypeCount = 12;

enum class ReduceOp : std::uint8_t { sum = 0, avg = 1, prod = 2, max = 3, min = 4 };
inline constexpr std::uint8_t kReduceOpCount = 5;

[[nodiscard]] constexpr std::size_t element_size(DataType type) {
  switch (type) {
    case DataType::uint8:
    case DataType::int8:
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
    default:
      return 8;
  }
}

// The type of partial results: float32 for 16-bit floats, 64-bit integers for integers under avg
// (see accumulation_size for elements of 64 bits), otherwise the element type.
[[nodiscard]] constexpr DataType accumulation_type(DataType type, ReduceOp op) {
  switch (type) {
    case DataType::float16:
    case DataType::bfloat16:
      return DataType::float32;
    case DataType::float32:
    case DataType::float64:
      return type;
    case DataType::uint8:
    case DataType::uint16:
    case DataType::uint32:
    case DataType::uint64:
      return op == ReduceOp::avg ? DataType::uint64 : type;
    default:
      return op == ReduceOp::avg ? DataType::int64 : type;
  }
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
