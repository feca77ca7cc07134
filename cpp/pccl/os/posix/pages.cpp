#include "pccl/os/pages.h"

#include <sys/mman.h>

namespace pccl::os {

void* map_pages(std::size_t size) {
  void* const at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

void unmap_pages(void* at, std::size_t size) { (void)::munmap(at, size); }

void touch_pages(void*, std::size_t) {}

}  // namespace pccl::os
