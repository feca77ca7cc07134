// Memory that several processes see: an anonymous file without a name, passed on as a descriptor,
// gone with the last process that has it. Nothing is left behind in /dev/shm, whoever is killed.
// Forked children have no part in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "pccl/base/error.h"

namespace pccl::memory {

// Who else may write.
enum class Access : std::uint8_t {
  read,   // nobody: sealed before it is handed out, so that a peer gone wild can harm nothing
  write,  // everybody who has the descriptor
};

// Mapped memory, and the descriptor to pass it on with. Unmapped when dropped.
class Region {
 public:
  // Takes over what is not null: the mapping, the descriptor (-1: none), or what holds the memory.
  Region(std::uint8_t* data, std::size_t size, int descriptor, std::shared_ptr<void> holder = {});
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  [[nodiscard]] std::uint8_t* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  // Of our own memory; -1: it is another's, or its maker forked and this is the child, where the
  // number may be something else's.
  [[nodiscard]] int descriptor() const;

 private:
  std::uint8_t* data_;
  std::size_t size_;
  int descriptor_;
  std::uint64_t generation_;  // of forks, when it was made
  std::shared_ptr<void> holder_;
};
using RegionPtr = std::shared_ptr<Region>;

// How an engine gets memory of its own to share; simulated in tests. Zeroed.
using RegionMaker = std::function<Result<RegionPtr>(std::size_t, Access)>;

// Memory of this process that others may map as `others` says. Refused where the system is too old
// to seal it, or out of memory.
[[nodiscard]] Result<RegionPtr> make_region(std::size_t size, Access others);

// Another process's memory, `access` to it. The descriptor stays the caller's. Refused unless its
// size is sealed (touching what its owner cut off would be fatal), and what is only to be read is
// sealed against us too.
[[nodiscard]] Result<RegionPtr> map_region(int descriptor, std::size_t size, Access access);

}  // namespace pccl::memory
