// Threads of the library.
#pragma once

#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

namespace pccl::io {

// Starts a thread that receives no signals: those are for the program's own threads.
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
  return std::thread(std::move(work));
}

}  // namespace pccl::io
