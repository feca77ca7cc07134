// Kernels for AVX-512 F, BW, VL and DQ; the build compiles this file with those enabled.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || \
    !defined(__AVX512DQ__)
#error "compile with -mavx512f -mavx512bw -mavx512vl -mavx512dq"
#endif
#define PCCL_KERNEL_TABLE kAvx512Kernels
#include "pccl/reduce/kernels.inl"
#endif
