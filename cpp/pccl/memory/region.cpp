#include "pccl/memory/region.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "pccl/base/fork.h"
#include "pccl/os/shared_memory.h"

namespace pccl::memory {
namespace {

Error failed(const char* what) {
  return {Code::internal_error, std::string(what) + ": " + std::generic_category().message(errno)};
}

// Whether a file may be that long. One that grows beyond the limit ends a process that does not
// ignore SIGXFSZ.
bool may_be_file(std::size_t size) {
  rlimit longest{};
  return ::getrlimit(RLIMIT_FSIZE, &longest) != 0 || longest.rlim_cur == RLIM_INFINITY ||
         size <= static_cast<std::uint64_t>(longest.rlim_cur);  // signed on FreeBSD
}

// Zeroed memory that cannot be passed on.
Result<RegionPtr> make_private(std::size_t size) {
  // MAP_SHARED with the children of a fork, like memory that can be passed on.
  void* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANON, -1, 0);
  if (at == MAP_FAILED) return failed("mmap");
  return std::make_shared<Region>(static_cast<std::uint8_t*>(at), size, -1);
}

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

bool Region::made_here() const { return fork_generation() == generation_; }

int Region::descriptor() const { return made_here() ? descriptor_ : -1; }

Result<RegionPtr> make_region(std::size_t size, Access others) {
  if (!os::shares_memory()) return make_private(size);
  if (!may_be_file(size)) {
    errno = EFBIG;
    return failed("the limit of files (ulimit -f)");
  }
  const int descriptor = open_descriptor(os::open_shared_memory);
  if (descriptor < 0) return failed("opening shared memory");
  const auto give_up = [&](const char* what) {
    Error error = failed(what);
    close_descriptor(descriptor);
    return error;
  };
  if (::ftruncate(descriptor, static_cast<off_t>(size)) != 0) return give_up("ftruncate");
  if (const int error = os::reserve(descriptor, size); error != 0) {
    errno = error;
    return give_up("reserving shared memory");
  }
  void* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (at == MAP_FAILED) return give_up("mmap");
  os::keep_from_children(at, size);
  auto region = std::make_shared<Region>(static_cast<std::uint8_t*>(at), size, descriptor);
  os::use_huge_pages(at, size);
  // The seal does not affect the mapping above, which stays the only one that can write.
  if (os::seal(descriptor, others == Access::read) != 0) return failed("sealing memory");
  return region;
}

Result<RegionPtr> map_region(int descriptor, std::size_t size, Access access) {
  struct stat about {};
  if (::fstat(descriptor, &about) != 0) return failed("fstat");
  const int sealed = os::is_sealed(descriptor, access == Access::read);
  if (sealed < 0) return failed("reading seals");
  if (sealed == 0 || static_cast<std::size_t>(about.st_size) != size || size == 0) {
    return Error{Code::refused, "shared memory that is not sealed as agreed"};
  }
  const int protection = access == Access::read ? PROT_READ : PROT_READ | PROT_WRITE;
  void* at = ::mmap(nullptr, size, protection, MAP_SHARED, descriptor, 0);
  if (at == MAP_FAILED) return failed("mmap");
  os::keep_from_children(at, size);
  return std::make_shared<Region>(static_cast<std::uint8_t*>(at), size, -1);
}

}  // namespace pccl::memory
