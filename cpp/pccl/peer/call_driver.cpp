#include "pccl/peer/call_driver.h"

#include <utility>
#include <variant>

namespace pccl::peer {

void CallDriver::enter_next(const CallPtr& call, wire::RoundKind kind, wire::RoundPayload payload) {
  const wire::RoundKey key = table_.next_round(kind);
  call->key = key;
  if (const auto early = table_.take_early(key)) return end(*call, early->error, early->record);
  enter(call, key, std::move(payload));
}

void CallDriver::enter(const CallPtr& call, const wire::RoundKey& key, wire::RoundPayload payload) {
  CallEntry* entry = table_.find(key);
  if (entry == nullptr) entry = &table_.open(key, call);
  entry->entered = payload;
  session_.say(wire::EnterRound{{key, std::move(payload)}});
}

std::optional<Decision> CallDriver::move_to(const CallPtr& call, const wire::RoundKey& next) {
  const wire::CallKey key = next;
  const wire::CallKey before = std::exchange(call->key, key);
  if (auto early = table_.take_early(key)) return early;
  if (table_.find(key) == nullptr) (void)table_.open(key, call);
  // The caller gave up while the previous round was being decided.
  if (call->gave_up && before != key) request_abort(key, call->gave_up->second);
  return std::nullopt;
}

void CallDriver::request_abort(const wire::CallKey& key, Code code, const PeerId& lost) {
  const wire::AbortRequest request{key, code, lost};
  if (CallEntry* const entry = table_.find(key)) entry->abort = request;
  session_.say(request);
}

// REQUIRES: the call's traffic, or its update, is complete.
void CallDriver::count(const Call& call, bool committed) {
  totals_.sent_bytes += call.traffic.tx_bytes;
  totals_.received_bytes += call.traffic.rx_bytes;
  totals_.saved_bytes += call.traffic.saved_bytes;
  if (call.update != nullptr) {
    totals_.sent_bytes += call.update->tx_bytes;
    totals_.received_bytes += call.update->rx_bytes;
  }
  const auto* operation = std::get_if<wire::OpKey>(&call.key);
  // A call that was refused before it took a number has none of an admission.
  if (operation == nullptr || operation->admission == 0) return;
  totals_.reruns += call.attempts > 1 ? call.attempts - 1 : 0;
  totals_.spent += call.timing.spent();
  if (!committed) {
    ++totals_.aborted;
    return;
  }
  ++totals_.operations;
  totals_.reduced_bytes += call.bytes;
}

void CallDriver::end(Call& call, Error error, const Record& record) {
  if (call.done) return;
  call.timing.end(now_);
  count(call, error.code == Code::ok);
  if (tracer_.on()) tracer_.ended(call, error.code);
  const auto* operation = std::get_if<wire::OpKey>(&call.key);
  if (operation != nullptr && error.code == Code::ok && worked_since_ == 0)
    worked_since_ = operation->admission;
  call.error = std::move(error);
  call.record = record;
  call.done.store(true, std::memory_order_release);
  actions_.calls_ended = true;
}

}  // namespace pccl::peer
