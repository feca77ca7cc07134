// The floating-point environment in which pccl computes.
#pragma once

#include <cfenv>
#include <cstdint>

namespace pccl {

// Sets the default environment for a scope: round to nearest, and keep denormals. Members must
// compute the same bytes, and threads may have another environment: XLA's flush denormals, as do
// those that have called torch.set_flush_denormal. *one thread: the one that made it*
class DefaultFloats {
 public:
  DefaultFloats() { enter(); }
  ~DefaultFloats() { leave(); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

  // The thread has its own environment between the two.
  void leave();
  void enter();

 private:
  // The control register is read in each call of the engine, and hardly ever written. A whole
  // std::fenv_t takes ten times as long.
#if defined(__x86_64__)
  static constexpr unsigned kControl = 0xffc0;  // the other bits tell of exceptions
  static constexpr unsigned kDefault = 0x1f80;
  [[nodiscard]] bool differs() const { return (theirs_ & kControl) != kDefault; }
  unsigned theirs_ = 0;
#elif defined(__aarch64__)
  std::uint64_t theirs_ = 0;  // 0: the default
#else
  std::fenv_t theirs_{};
#endif
};

#if defined(__x86_64__)

inline void DefaultFloats::enter() {
  theirs_ = __builtin_ia32_stmxcsr();
  if (differs()) __builtin_ia32_ldmxcsr(kDefault);
}
inline void DefaultFloats::leave() {
  if (differs()) __builtin_ia32_ldmxcsr(theirs_);
}

#elif defined(__aarch64__)

inline void DefaultFloats::enter() {
  asm volatile("mrs %0, fpcr" : "=r"(theirs_)::"memory");
  if (theirs_ != 0) asm volatile("msr fpcr, xzr" ::: "memory");
}
inline void DefaultFloats::leave() {
  if (theirs_ != 0) asm volatile("msr fpcr, %0" ::"r"(theirs_) : "memory");
}

#else

inline void DefaultFloats::enter() {
  std::fegetenv(&theirs_);
  std::fesetenv(FE_DFL_ENV);
}
inline void DefaultFloats::leave() { std::fesetenv(&theirs_); }

#endif

}  // namespace pccl
