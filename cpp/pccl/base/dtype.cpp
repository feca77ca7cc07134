#include "pccl/base/dtype.h"

namespace pccl {

const char* name(DataType type) {
  switch (type) {
    case DataType::uint8:
      return "uint8";
    case DataType::int8:
      return "int8";
    case DataType::int16:
      return "int16";
    case DataType::uint16:
      return "uint16";
    case DataType::uint32:
      return "uint32";
    case DataType::int32:
      return "int32";
    case DataType::uint64:
      return "uint64";
    case DataType::int64:
      return "int64";
    case DataType::float16:
      return "float16";
    case DataType::bfloat16:
      return "bfloat16";
    case DataType::float32:
      return "float32";
    case DataType::float64:
      return "float64";
  }
  return "unknown";  // a byte from the wire that nobody checked; still printable
}

const char* name(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::avg:
      return "avg";
    case ReduceOp::prod:
      return "prod";
    case ReduceOp::max:
      return "max";
    case ReduceOp::min:
      return "min";
  }
  return "unknown";
}

}  // namespace pccl
