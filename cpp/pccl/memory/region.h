// Memory that several processes map: an anonymous file, passed on as a descriptor and freed with
// the last process that has it. Nothing is left in /dev/shm when a process is killed. Forked
// children do not inherit the mapping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "pccl/base/error.h"

namespace pccl::memory {

// Access of processes other than the owner.
enum class Access : std::uint8_t {
  read,   // read only: sealed before it is passed on, so that a faulty peer does no harm
  write,  // read and write, with the descriptor
};

// Mapped memory, and the descriptor to pass it on. Unmapped and closed when dropped.
class Region {
 public:
  // Takes over the mapping and the descriptor (-1: none). If there is a `holder`, that owns the
  // mapping instead.
  Region(std::uint8_t* data, std::size_t size, int descriptor, std::shared_ptr<void> holder = {});
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  [[nodiscard]] std::uint8_t* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  // False in a forked child.
  [[nodiscard]] bool made_here() const;
  // The descriptor of memory that this process made. -1 for another process's memory, and in a
  // forked child, where the number may belong to something else.
  [[nodiscard]] int descriptor() const;

 private:
  std::uint8_t* data_;
  std::size_t size_;
  int descriptor_;
  std::uint64_t generation_;  // fork_generation() when it was made
  std::shared_ptr<void> holder_;
};
using RegionPtr = std::shared_ptr<Region>;

// Makes zeroed memory for an engine to share. Simulated in tests.
using RegionMaker = std::function<Result<RegionPtr>(std::size_t, Access)>;

// Makes memory of this process, with access `others` for other processes. Where os::shares_memory()
// is false it has no descriptor, and only forked children see it. Error: internal_error (no memory,
// it exceeds the process's limit of files, or the kernel is too old to seal it).
[[nodiscard]] Result<RegionPtr> make_region(std::size_t size, Access others);

// Maps another process's memory with `access`. The descriptor stays the caller's. Errors:
// internal_error (a system call failed); refused (it does not have the sealed size `size`, or is
// for reading only and not sealed against writes). Without the seal on its size, its owner could
// shorten it, and an access would be fatal.
[[nodiscard]] Result<RegionPtr> map_region(int descriptor, std::size_t size, Access access);

}  // namespace pccl::memory
