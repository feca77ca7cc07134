// A process that reduces with others of its host until it is told to stop, is killed, or finds a
// wrong result.
#pragma once

#include <cstdint>

#include "pccl/base/settings.h"
#include "pccl/wire/records.h"
#include "tests/stress/shared.h"

namespace pccl::stress {

struct WorkerOptions {
  wire::Address master;
  std::uint32_t group = 0;
  std::uint64_t run_seed = 0;  // equal on all workers: determines the operations
  std::uint64_t seed = 0;      // of this worker
  Settings settings;
};

// Returns the exit status. slot.failure describes a failure.
[[nodiscard]] int run_worker(const WorkerOptions& options, const Orders& orders, Slot& slot);

}  // namespace pccl::stress
