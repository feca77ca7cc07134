// The table of kernels each instruction set provides. Internal to this room: reduce.cpp picks one
// table at run time.
#pragma once

#include <cstddef>

#include "pccl/base/dtype.h"
#include "pccl/reduce/reduce.h"

namespace pccl::reduce {

// One (dtype, op) of `reduce`, with the same arguments and promises. REQUIRES: count > 0.
using Kernel = void (*)(const void* own, const Contribution* contributions,
                        std::size_t contribution_count, unsigned divisor, void* out,
                        std::size_t count);

struct KernelTable {
  Kernel kernels[kDataTypeCount][kReduceOpCount];  // by the values of DataType and ReduceOp
};

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

}  // namespace pccl::reduce
