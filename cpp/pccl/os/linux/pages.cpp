#include "pccl/os/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "pccl/os/shared_memory.h"

// Older C libraries lack it. It needs Linux 5.14.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace pccl::os {
namespace {

// Blocks begin where a huge page of 2 MiB does. Kernels before 6.7 do not see to that themselves.
constexpr std::size_t kAlignment = std::size_t{2} << 20;

}  // namespace

void* map_pages(std::size_t size) {
  const std::size_t mapped = size + kAlignment;
  void* const all =
      ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  auto* const first = static_cast<std::uint8_t*>(all);
  const std::size_t before =
      (kAlignment - reinterpret_cast<std::uintptr_t>(first) % kAlignment) % kAlignment;
  if (before > 0) (void)::munmap(first, before);
  (void)::munmap(first + before + size, mapped - before - size);
  use_huge_pages(first + before, size);
  return first + before;
}

void unmap_pages(void* at, std::size_t size) { (void)::munmap(at, size); }

void touch_pages(void* at, std::size_t size) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  auto* const first = static_cast<std::uint8_t*>(at);
  const std::size_t before = (page - reinterpret_cast<std::uintptr_t>(first) % page) % page;
  const std::size_t whole = size > before ? (size - before) / page * page : 0;
  if (whole > 0) (void)::madvise(first + before, whole, MADV_POPULATE_WRITE);
}

}  // namespace pccl::os
