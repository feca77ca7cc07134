// POSIX has shared memory with names only: a killed process leaves them behind. It has no seals
// either, so a faulty peer could shorten memory that others have mapped.
#include "pccl/os/shared_memory.h"

#include <cerrno>

namespace pccl::os {
namespace {

int unsupported() {
  errno = ENOTSUP;
  return -1;
}

}  // namespace

bool shares_memory() { return false; }

int open_shared_memory() { return unsupported(); }

int reserve(int, std::size_t) { return ENOTSUP; }

int seal(int, bool) { return unsupported(); }

int is_sealed(int, bool) { return unsupported(); }

std::uint64_t most_shared_memory() { return 0; }

void keep_from_children(void*, std::size_t) {}

void give_to_children(void*, std::size_t) {}

void use_huge_pages(void*, std::size_t) {}

}  // namespace pccl::os
