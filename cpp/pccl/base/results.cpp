#include "pccl/base/results.h"

namespace pccl {
namespace {

// The code for a call that failed, where the cause alone does not determine it.
Result1 failed(CallKind call) {
  switch (call) {
    case CallKind::connect:
      return Result1::master_connection_failed;
    case CallKind::topology:
      return Result1::update_topology_failed;
    case CallKind::optimize:
      return Result1::topology_optimization_failed;
    case CallKind::question:
    case CallKind::sync_shared_state:
    case CallKind::sync:
      return Result1::invalid_usage;
    case CallKind::collective:
      break;
  }
  return Result1::rank_connection_lost;
}

bool in_sync(CallKind call) {
  return call == CallKind::sync || call == CallKind::sync_shared_state;
}

}  // namespace

Result1 result_of(Code cause, CallKind call) {
  switch (cause) {
    case Code::ok:
      return Result1::success;
    case Code::invalid_argument:
    case Code::not_supported:
      return Result1::invalid_argument;
    case Code::invalid_usage:
      return Result1::invalid_usage;
    case Code::not_initialized:
      return Result1::not_initialized;
    case Code::pending_operations:
      return Result1::pending_async_ops;
    case Code::mismatched_call:
      return in_sync(call) ? Result1::invalid_usage : Result1::invalid_argument;
    case Code::too_few_peers:
      return Result1::too_few_peers;
    case Code::peer_lost:
      return call == CallKind::topology ? failed(call) : Result1::rank_connection_lost;
    case Code::unreachable:
      return call == CallKind::connect ? failed(call) : Result1::rank_connection_failed;
    case Code::refused:
    case Code::authentication_failed:
      return Result1::master_connection_failed;
    case Code::revision_mismatch:
      return Result1::invalid_usage;
    case Code::state_unavailable:
      return call == CallKind::sync_shared_state ? Result1::invalid_usage
                                                 : Result1::no_shared_state_available;
    case Code::internal_error:
      return Result1::internal_error;
    case Code::deadlock:
    case Code::timeout:
    case Code::master_lost:
    case Code::evicted:
    case Code::interrupted:
      break;
  }
  return failed(call);
}

}  // namespace pccl
