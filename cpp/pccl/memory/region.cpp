#include "pccl/memory/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "pccl/base/fork.h"

// Older C libraries lack these. F_SEAL_FUTURE_WRITE needs Linux 5.1.
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace pccl::memory {
namespace {

// A huge page is what one page table maps: 2 MiB with pages of 4 KiB, 512 MiB with 64 KiB.
std::size_t huge_page() {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return page / sizeof(std::uint64_t) * page;
}

Error failed(const char* what) {
  return {Code::internal_error,
          std::string(what) + ": " + std::generic_category().message(errno),
          {},
          {}};
}

// Forked children have no use for it, and would keep it as long as they live.
void keep_from_children(void* at, std::size_t size) { (void)::madvise(at, size, MADV_DONTFORK); }

}  // namespace

Region::Region(std::uint8_t* data, std::size_t size, int descriptor, std::shared_ptr<void> holder)
    : data_(data),
      size_(size),
      descriptor_(descriptor),
      generation_(fork_generation()),
      holder_(std::move(holder)) {}

Region::~Region() {
  if (data_ != nullptr && holder_ == nullptr) ::munmap(data_, size_);
  if (descriptor() >= 0) close_descriptor(descriptor_);
}

int Region::descriptor() const { return fork_generation() == generation_ ? descriptor_ : -1; }

Result<RegionPtr> make_region(std::size_t size, Access others) {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  const int descriptor = open_descriptor([&] {
    const int made = ::memfd_create("pccl", kFlags | MFD_NOEXEC_SEAL);
    return made < 0 && errno == EINVAL ? ::memfd_create("pccl", kFlags) : made;
  });
  if (descriptor < 0) return failed("memfd_create");
  const auto give_up = [&](const char* what) {
    Error error = failed(what);
    close_descriptor(descriptor);
    return error;
  };
  if (::ftruncate(descriptor, static_cast<off_t>(size)) != 0) return give_up("ftruncate");
  void* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (at == MAP_FAILED) return give_up("mmap");
  keep_from_children(at, size);
  auto region = std::make_shared<Region>(static_cast<std::uint8_t*>(at), size, descriptor);
  if (size >= huge_page()) (void)::madvise(at, size, MADV_HUGEPAGE);
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  // The seal does not affect the mapping above, which stays the only one that can write.
  if (others == Access::read) seals |= F_SEAL_FUTURE_WRITE;
  if (::fcntl(descriptor, F_ADD_SEALS, seals) != 0) return failed("sealing memory");
  return region;
}

Result<RegionPtr> map_region(int descriptor, std::size_t size, Access access) {
  struct stat about {};
  if (::fstat(descriptor, &about) != 0) return failed("fstat");
  const int seals = ::fcntl(descriptor, F_GET_SEALS);
  if (seals < 0) return failed("reading seals");
  const int wanted =
      F_SEAL_SHRINK | F_SEAL_GROW | (access == Access::read ? F_SEAL_FUTURE_WRITE : 0);
  if ((seals & wanted) != wanted || static_cast<std::size_t>(about.st_size) != size || size == 0) {
    return Error{Code::refused, "shared memory that is not sealed as agreed", {}, {}};
  }
  const int protection = access == Access::read ? PROT_READ : PROT_READ | PROT_WRITE;
  void* at = ::mmap(nullptr, size, protection, MAP_SHARED, descriptor, 0);
  if (at == MAP_FAILED) return failed("mmap");
  keep_from_children(at, size);
  return std::make_shared<Region>(static_cast<std::uint8_t*>(at), size, -1);
}

}  // namespace pccl::memory
