#include "pccl/os/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

// Older C libraries lack these. F_SEAL_FUTURE_WRITE needs Linux 5.1.
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace pccl::os {
namespace {

// A signal ends a call that reserves memory, and the kernel gives back what it had of it. Signals
// of an interval timer would end every call for a large file.
constexpr std::size_t kReserveStep = std::size_t{16} << 20;

constexpr int kFixedSize = F_SEAL_SHRINK | F_SEAL_GROW;

// A huge page is what one page table maps: 2 MiB with pages of 4 KiB, 512 MiB with 64 KiB.
std::size_t huge_page() {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return page / sizeof(std::uint64_t) * page;
}

// vm.overcommit_memory = 2. Ordinary memory is counted when it is mapped, that of a memfd when it
// is first used.
bool counts_memory() {
  const int file = ::open("/proc/sys/vm/overcommit_memory", O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  char mode = '0';
  const ssize_t read = ::read(file, &mode, 1);
  ::close(file);
  return read == 1 && mode == '2';
}

}  // namespace

bool shares_memory() { return true; }

int open_shared_memory() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  const int made = ::memfd_create("pccl", kFlags | MFD_NOEXEC_SEAL);
  return made < 0 && errno == EINVAL ? ::memfd_create("pccl", kFlags) : made;
}

int reserve(int descriptor, std::size_t size) {
  if (!counts_memory()) return 0;
  for (std::size_t at = 0; at < size; at += kReserveStep) {
    const std::size_t length = std::min(kReserveStep, size - at);
    int error = EINTR;
    while (error == EINTR)
      error = ::posix_fallocate(descriptor, static_cast<off_t>(at), static_cast<off_t>(length));
    if (error != 0) return error;
  }
  return 0;
}

int seal(int descriptor, bool writes) {
  // A seal on writes does not affect mappings made before it.
  return ::fcntl(descriptor, F_ADD_SEALS,
                 kFixedSize | F_SEAL_SEAL | (writes ? F_SEAL_FUTURE_WRITE : 0));
}

int is_sealed(int descriptor, bool writes) {
  const int seals = ::fcntl(descriptor, F_GET_SEALS);
  if (seals < 0) return -1;
  const int wanted = kFixedSize | (writes ? F_SEAL_FUTURE_WRITE : 0);
  return (seals & wanted) == wanted ? 1 : 0;
}

std::uint64_t most_shared_memory() {
  struct sysinfo host {};
  if (::sysinfo(&host) != 0) return 0;
  return (std::uint64_t{host.totalram} + host.totalswap) * host.mem_unit;
}

void keep_from_children(void* at, std::size_t size) { (void)::madvise(at, size, MADV_DONTFORK); }

void give_to_children(void* at, std::size_t size) { (void)::madvise(at, size, MADV_DOFORK); }

void use_huge_pages(void* at, std::size_t size) {
  if (size >= huge_page()) (void)::madvise(at, size, MADV_HUGEPAGE);
}

}  // namespace pccl::os
