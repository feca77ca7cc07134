// pccl.h: the shared state.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "pccl/base/dtype.h"
#include "pccl/base/utf8.h"
#include "pccl/capi/communicator.h"

namespace pccl::capi {
namespace {

using wire::SyncStrategy;
static_assert(PCCL_SHARED_STATE_SYNC_STRATEGY_ENFORCE_POPULAR ==
              static_cast<int>(SyncStrategy::enforce_popular));
static_assert(PCCL_SHARED_STATE_SYNC_STRATEGY_RECEIVE_ONLY ==
              static_cast<int>(SyncStrategy::receive_only));
static_assert(PCCL_SHARED_STATE_SYNC_STRATEGY_SEND_ONLY ==
              static_cast<int>(SyncStrategy::send_only));

Result<state::LocalEntry> entry_from(const pcclTensorInfo_t& info) {
  if (info.name == nullptr) return refuse("an entry's name is NULL").error();
  const std::string name = info.name;
  if (!is_utf8(name)) return refuse("the name of an entry is not UTF-8").error();
  const auto wrong = [&](const char* what) { return refuse(name + ": " + what).error(); };
  const auto type = static_cast<int>(info.datatype);
  if (type < 0 || type >= kDataTypeCount) return wrong("no such datatype");
  if (info.device_type == pcclDeviceCuda)
    return Error{Code::not_supported, name + ": only CPU memory is supported yet"};
  if (info.device_type != pcclDeviceCpu) return wrong("no such device_type");
  if (info.data == nullptr && info.count != 0) return wrong("data is NULL");
  const auto dtype = static_cast<DataType>(type);
  if (info.count > SIZE_MAX / element_size(dtype)) return wrong("count is too large");
  state::LocalEntry entry;
  entry.what.name = name;
  entry.what.kind = pccl::name(dtype);
  entry.what.shape = {info.count};
  entry.what.loose = info.allow_content_inequality;
  entry.what.bytes = info.count * element_size(dtype);
  entry.data = entry.writable = static_cast<std::uint8_t*>(info.data);
  return entry;
}

Status synchronize(Connection& connection, const node::Limit& limit, pcclSharedState_t& shared,
                   pcclSharedStateSyncStrategy_t strategy, pcclSharedStateSyncInfo_t* info_out) {
  if (shared.count == 0) return refuse("a shared state has at least one entry");
  if (shared.infos == nullptr) return refuse("shared_state->infos is NULL");
  const auto how = static_cast<int>(strategy);
  if (how < 0 || how > PCCL_SHARED_STATE_SYNC_STRATEGY_SEND_ONLY)
    return refuse("no strategy " + std::to_string(how));
  std::vector<state::LocalEntry> entries;
  for (const pcclTensorInfo_t& info : std::span(shared.infos, shared.count)) {
    auto entry = entry_from(info);
    if (!entry) return entry.error();
    entries.push_back(std::move(*entry));
  }
  wire::SyncVote vote;
  vote.has_revision = true;
  vote.revision = shared.revision;
  vote.strategy = static_cast<SyncStrategy>(how);
  const Result<peer::CallPtr> call =
      connection.peer.sync(std::move(entries), vote, {}, {}, limit, {});
  if (!call) return call.error();
  connection.peer.took_over();
  const state::Update& update = *(*call)->update;
  shared.revision = update.decision.revision;
  if (info_out != nullptr) *info_out = {update.tx_bytes, update.rx_bytes};
  return {};
}

}  // namespace
}  // namespace pccl::capi

pcclResult_t pcclSynchronizeSharedState(const pcclComm_t* comm, pcclSharedState_t* shared_state,
                                        pcclSharedStateSyncStrategy_t strategy,
                                        pcclSharedStateSyncInfo_t* info_out) {
  using namespace pccl;        // NOLINT: this file implements a C header
  using namespace pccl::capi;  // NOLINT
  return connected(__func__, CallKind::sync_shared_state, comm,
                   [&](Connection& connection, const node::Limit& limit) -> Status {
                     if (shared_state == nullptr) return refuse("shared_state is NULL");
                     return synchronize(connection, limit, *shared_state, strategy, info_out);
                   });
}
