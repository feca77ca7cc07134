#include "pccl/os/bell.h"

#include <semaphore.h>

#include <cerrno>
#include <system_error>

namespace pccl::os {

struct Bell::State {
  sem_t count{};
};

Bell::Bell() : state_(std::make_unique<State>()) {
  if (::sem_init(&state_->count, 0, 0) != 0)
    throw std::system_error(errno, std::generic_category(), "sem_init");
}

Bell::~Bell() { ::sem_destroy(&state_->count); }

void Bell::ring() { ::sem_post(&state_->count); }

void Bell::wait() {
  while (::sem_wait(&state_->count) != 0 && errno == EINTR) {
  }
}

}  // namespace pccl::os
