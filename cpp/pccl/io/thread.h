// Threads of the library.
#pragma once

#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

#include "pccl/base/floats.h"

namespace pccl::io {

// Starts a thread that receives no signals: those are for the program's own threads. It computes in
// the default floating-point environment, and not in that of the thread that starts it.
template <class Work>
[[nodiscard]] std::thread start_thread(Work work) {
  struct Blocked {
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before{};
  };
  const Blocked blocked;
  return std::thread([work = std::move(work)]() mutable {
    const DefaultFloats defaults;
    work();
  });
}

}  // namespace pccl::io
