// All-reduce as a custom call of a program that XLA has compiled: what `pccl.allreduce` becomes
// inside jax.jit.
#pragma once

#include <cstdint>
#include <memory>

#include "pccl/bindings/common.h"
#include "pccl/node/communicator.h"

namespace pccl::bindings {

// Communicators by number, for compiled programs: these outlive them, and hold the number only.
// *any thread*

// A number that no other communicator of this process has.
[[nodiscard]] std::int64_t next_communicator();
// Null: it is closed.
void enlist_communicator(std::int64_t number, const std::shared_ptr<node::Communicator>& engine);

}  // namespace pccl::bindings
