// The explicit API's result codes. The code of a failure depends on its cause and on the call.
#pragma once

#include <cstdint>

#include "pccl/base/error.h"

namespace pccl {

// Values are the explicit API's (docs/guide/from-pypccl.md).
enum class Result1 : std::uint8_t {
  success = 0,
  not_initialized = 1,
  internal_error = 2,
  invalid_argument = 3,
  invalid_usage = 4,
  too_few_peers = 5,
  master_connection_failed = 6,
  rank_connection_failed = 7,
  rank_connection_lost = 8,
  no_shared_state_available = 9,
  pending_async_ops = 10,
  update_topology_failed = 11,
  topology_optimization_failed = 12,
};

// The kinds of calls that the table distinguishes.
enum class CallKind : std::uint8_t {
  connect,            // connect, init
  topology,           // update_topology, admit
  optimize,           // optimize_topology
  question,           // are_peers_pending, get_attribute
  sync_shared_state,  // explicit API
  sync,               // simple API
  collective,         // reductions, their waits, barrier
};

// Returns the explicit API's code for a failure with this cause in this call. For Python and C.
[[nodiscard]] Result1 result_of(Code cause, CallKind call);

}  // namespace pccl
