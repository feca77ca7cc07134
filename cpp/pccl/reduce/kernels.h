// The table of kernels that each instruction set provides. Internal to this room; reduce.cpp
// selects a table at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pccl/base/dtype.h"
#include "pccl/reduce/quantize.h"
#include "pccl/reduce/reduce.h"

namespace pccl::reduce {

// `reduce` for one (dtype, op), with the same arguments and contract. REQUIRES: count > 0.
using Kernel = void (*)(const void* own, const Contribution* contributions,
                        std::size_t contribution_count, unsigned divisor, void* out,
                        std::size_t count);

// Encodes one block: writes its range and its codes. Arguments as for `encode`; `first` is the
// index of the block's first element in its run.
using EncodeBlock = void (*)(const Quantization& how, const void* values, std::size_t count,
                             std::uint64_t seed, std::size_t first, void* range, void* codes);
// Decodes one block.
using DecodeBlock = void (*)(const Quantization& how, const void* range, const void* codes,
                             std::size_t count, void* values);
// Rounds values of the accumulation type to elements, to nearest, ties to even. `saturate`: finite
// values stay finite. Every NaN becomes the canonical one.
using Narrow = void (*)(const void* values, void* elements, std::size_t count, bool saturate);

struct KernelTable {
  // By the values of DataType and ReduceOp; null where elements do not combine so.
  Kernel kernels[kDataTypeCount][kReduceOpCount];
  EncodeBlock encode[2];  // float32, float64
  DecodeBlock decode[2];
  Narrow narrow[4];  // see narrow_index
};

// The place in KernelTable::narrow of a type that is computed in float32; -1 for the others.
[[nodiscard]] constexpr int narrow_index(DataType type) {
  switch (type) {
    case DataType::float16:
      return 0;
    case DataType::bfloat16:
      return 1;
    case DataType::float8_e4m3fn:
      return 2;
    case DataType::float8_e5m2:
      return 3;
    default:
      return -1;
  }
}

// The kernels for this processor.
[[nodiscard]] const KernelTable& kernel_table();

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

}  // namespace pccl::reduce
