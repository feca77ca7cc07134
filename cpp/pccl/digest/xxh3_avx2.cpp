// XXH3 for AVX2; the build compiles this file with it enabled.
#if defined(__x86_64__)
#if !defined(__AVX2__)
#error "compile with -mavx2"
#endif
#include "pccl/digest/xxh3.inl"

namespace pccl::digest {

extern const Xxh3 kXxh3Avx2;
const Xxh3 kXxh3Avx2{"avx2", &hash64, &hash128, &copy128};

}  // namespace pccl::digest
#endif
