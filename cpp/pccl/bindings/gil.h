// Giving up the GIL for a blocking call and taking it back, also while the interpreter ends.
//
// CPython before 3.14 answers a daemon thread that asks for the GIL while the interpreter is being
// finalised with pthread_exit: an unwinding that no C++ frame may stop, through frames that must
// not throw. It would end the process with SIGABRT. Here such a thread sleeps until the process is
// gone, as it does from 3.14 on.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

namespace pccl::bindings {

// Runs code that may take the GIL: Python code gives it up and takes it back between any two
// bytecodes. Exceptions of the code pass through.
template <class Code>
auto run_python(const Code& code) {
#ifdef __GLIBCXX__
  try {
    return code();
  } catch (const abi::__forced_unwind&) {
    for (;;) pause();
  }
#else
  return code();
#endif
}

template <class Take>
auto take_gil(const Take& take) noexcept {
  return run_python(take);
}

// REQUIRES: the GIL.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    take_gil([this] { PyEval_RestoreThread(state_); });
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

class GilAcquire {
 public:
  GilAcquire() : state_(take_gil([] { return PyGILState_Ensure(); })) {}
  ~GilAcquire() { PyGILState_Release(state_); }
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace pccl::bindings
