#include "pccl/base/dtype.h"

namespace pccl {

// Returns "unknown" for an unchecked value from the wire.
const char* name(DataType type) {
  constexpr const char* kNames[kDataTypeCount] = {
      "uint8",  "int8",          "int16",       "uint16",    "uint32",    "int32",
      "uint64", "int64",         "float16",     "bfloat16",  "float32",   "float64",
      "bool",   "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"};
  const auto index = static_cast<std::size_t>(type);
  return index < kDataTypeCount ? kNames[index] : "unknown";
}

const char* name(ReduceOp op) {
  constexpr const char* kNames[kReduceOpCount] = {"sum", "avg", "prod", "max", "min"};
  const auto index = static_cast<std::size_t>(op);
  return index < kReduceOpCount ? kNames[index] : "unknown";
}

}  // namespace pccl
