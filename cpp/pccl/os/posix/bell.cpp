// macOS has sem_init, which always fails. A semaphore that had a name works everywhere.
#include "pccl/os/bell.h"

#include <fcntl.h>
#include <semaphore.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <system_error>

#include "pccl/os/random.h"

namespace pccl::os {

struct Bell::State {
  sem_t* count = SEM_FAILED;
};

Bell::Bell() : state_(std::make_unique<State>()) {
  std::array<std::uint8_t, 8> random{};
  if (!fill_random(random)) throw std::system_error(errno, std::generic_category(), "getentropy");
  std::string name = "/pccl-";  // macOS allows 31 bytes
  for (const std::uint8_t byte : random) {
    name.push_back(static_cast<char>('a' + byte / 16));
    name.push_back(static_cast<char>('a' + byte % 16));
  }
  state_->count = ::sem_open(name.c_str(), O_CREAT | O_EXCL, 0600, 0);
  if (state_->count == SEM_FAILED)
    throw std::system_error(errno, std::generic_category(), "sem_open");
  (void)::sem_unlink(name.c_str());
}

Bell::~Bell() { ::sem_close(state_->count); }

void Bell::ring() { ::sem_post(state_->count); }

void Bell::wait() {
  while (::sem_wait(state_->count) != 0 && errno == EINTR) {
  }
}

}  // namespace pccl::os
