// Kernels for AVX2 with F16C; the build compiles this file with those enabled.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile with -mavx2 -mf16c"
#endif
#define PCCL_KERNEL_TABLE kAvx2Kernels
#include "pccl/reduce/kernels.inl"
#endif
