// A pause between two looks at memory that another thread is about to change.
#pragma once

namespace pccl {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // most cores do nothing for `yield`
#endif
}

}  // namespace pccl
