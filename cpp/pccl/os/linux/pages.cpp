#include "pccl/os/pages.h"

#include <sys/mman.h>

#include <cstdint>

#include "pccl/os/shared_memory.h"

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

}  // namespace pccl::os
