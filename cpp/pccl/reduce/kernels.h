// The table of kernels each instruction set provides. Internal to this room: reduce.cpp picks one
// table at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pccl/base/dtype.h"
#include "pccl/reduce/quantize.h"
#include "pccl/reduce/reduce.h"

namespace pccl::reduce {

// One (dtype, op) of `reduce`, with the same arguments and promises. REQUIRES: count > 0.
using Kernel = void (*)(const void* own, const Contribution* contributions,
                        std::size_t contribution_count, unsigned divisor, void* out,
                        std::size_t count);

// One block of `encode`, with its arguments; `first` is the block's first element in its run.
// Writes the block's range and its codes.
using EncodeBlock = void (*)(const Quantization& how, const void* values, std::size_t count,
                             std::uint64_t seed, std::size_t first, void* range, void* codes);
// One block of `decode`.
using DecodeBlock = void (*)(const Quantization& how, const void* range, const void* codes,
                             std::size_t count, void* values);
// Values of the accumulation type as elements, nearest, ties to even; `saturate`: finite ones stay
// finite. A NaN is the canonical one.
using Narrow = void (*)(const void* values, void* elements, std::size_t count, bool saturate);

struct KernelTable {
  Kernel kernels[kDataTypeCount][kReduceOpCount];  // by the values of DataType and ReduceOp
  EncodeBlock encode[2];                           // float32, float64
  DecodeBlock decode[2];
  Narrow narrow[2];  // float16, bfloat16
};

// Those of this processor.
[[nodiscard]] const KernelTable& kernel_table();

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

}  // namespace pccl::reduce
