// Kernels for any processor of the architecture.
#define PCCL_KERNEL_TABLE kBaselineKernels
#include "pccl/reduce/kernels.inl"
