#include "pccl/capi/call.h"

#include <array>
#include <cstdio>

namespace pccl::capi {
namespace {

thread_local std::array<char, 4096> last{};  // cut, if need be

const char* name(pcclResult_t result) {
  switch (result) {
    case pcclSuccess:
      return "pcclSuccess";
    case pcclNotInitialized:
      return "pcclNotInitialized";
    case pcclInternalError:
      return "pcclInternalError";
    case pcclInvalidArgument:
      return "pcclInvalidArgument";
    case pcclInvalidUsage:
      return "pcclInvalidUsage";
    case pcclTooFewPeers:
      return "pcclTooFewPeers";
    case pcclMasterConnectionFailed:
      return "pcclMasterConnectionFailed";
    case pcclRankConnectionFailed:
      return "pcclRankConnectionFailed";
    case pcclRankConnectionLost:
      return "pcclRankConnectionLost";
    case pcclNoSharedStateAvailable:
      return "pcclNoSharedStateAvailable";
    case pcclPendingAsyncOps:
      return "pcclPendingAsyncOps";
    case pcclUpdateTopologyFailed:
      return "pcclUpdateTopologyFailed";
    case pcclTopologyOptimizationFailed:
      return "pcclTopologyOptimizationFailed";
  }
  return "an unknown result";
}

// The result codes of C are the engine's.
constexpr bool same(pcclResult_t c, Result1 engine) {
  return static_cast<int>(c) == static_cast<int>(engine);
}
static_assert(same(pcclNotInitialized, Result1::not_initialized));
static_assert(same(pcclInternalError, Result1::internal_error));
static_assert(same(pcclInvalidArgument, Result1::invalid_argument));
static_assert(same(pcclInvalidUsage, Result1::invalid_usage));
static_assert(same(pcclTooFewPeers, Result1::too_few_peers));
static_assert(same(pcclMasterConnectionFailed, Result1::master_connection_failed));
static_assert(same(pcclRankConnectionFailed, Result1::rank_connection_failed));
static_assert(same(pcclRankConnectionLost, Result1::rank_connection_lost));
static_assert(same(pcclNoSharedStateAvailable, Result1::no_shared_state_available));
static_assert(same(pcclPendingAsyncOps, Result1::pending_async_ops));
static_assert(same(pcclUpdateTopologyFailed, Result1::update_topology_failed));
static_assert(same(pcclTopologyOptimizationFailed, Result1::topology_optimization_failed));

}  // namespace

pcclResult_t fail(const char* function, CallKind kind, const Error& error) noexcept {
  const auto result = static_cast<pcclResult_t>(result_of(error.code, kind));
  (void)std::snprintf(last.data(), last.size(), "%s failed with %s: %s%s%s", function, name(result),
                      error.reason.c_str(), error.waiting.empty() ? "" : "\n",
                      error.waiting.c_str());
  return result;
}

const char* last_error() noexcept { return last.data(); }

}  // namespace pccl::capi
