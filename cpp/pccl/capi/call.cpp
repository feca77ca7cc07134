#include "pccl/capi/call.h"

#include <array>
#include <cstdio>

namespace pccl::capi {
namespace {

thread_local std::array<char, 4096> last{};  // longer texts are cut

struct Named {
  pcclResult_t result;
  Result1 engine;
  const char* name;
};
#define PCCL_RESULT(c, engine) \
  Named { c, Result1::engine, #c }
constexpr std::array kResults{
    PCCL_RESULT(pcclSuccess, success),
    PCCL_RESULT(pcclNotInitialized, not_initialized),
    PCCL_RESULT(pcclInternalError, internal_error),
    PCCL_RESULT(pcclInvalidArgument, invalid_argument),
    PCCL_RESULT(pcclInvalidUsage, invalid_usage),
    PCCL_RESULT(pcclTooFewPeers, too_few_peers),
    PCCL_RESULT(pcclMasterConnectionFailed, master_connection_failed),
    PCCL_RESULT(pcclRankConnectionFailed, rank_connection_failed),
    PCCL_RESULT(pcclRankConnectionLost, rank_connection_lost),
    PCCL_RESULT(pcclNoSharedStateAvailable, no_shared_state_available),
    PCCL_RESULT(pcclPendingAsyncOps, pending_async_ops),
    PCCL_RESULT(pcclUpdateTopologyFailed, update_topology_failed),
    PCCL_RESULT(pcclTopologyOptimizationFailed, topology_optimization_failed)};
#undef PCCL_RESULT

// The engine's results are those of pccl.h, and index the table.
constexpr bool in_order() {
  for (std::size_t i = 0; i < kResults.size(); ++i) {
    if (static_cast<std::size_t>(kResults[i].result) != i) return false;
    if (static_cast<std::size_t>(kResults[i].engine) != i) return false;
  }
  return true;
}
static_assert(in_order());

}  // namespace

pcclResult_t fail(const char* function, CallKind kind, const Error& error) noexcept {
  const Named& result = kResults[static_cast<std::size_t>(result_of(error.code, kind))];
  (void)std::snprintf(last.data(), last.size(), "%s failed with %s: %s%s%s", function, result.name,
                      error.reason.c_str(), error.waiting.empty() ? "" : "\n",
                      error.waiting.c_str());
  return result.result;
}

const char* last_error() noexcept { return last.data(); }

}  // namespace pccl::capi
