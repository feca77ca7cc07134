#include "pccl/peer/operations.h"

#include <xxhash.h>

#include <algorithm>
#include <string>

#include "pccl/peer/threads.h"
#include "pccl/topology/plan.h"

namespace pccl::peer {
namespace {

// An operation is reported as entered only after this delay. A small one is done before that.
constexpr Duration kEnterDelay = std::chrono::milliseconds(1);

// The bytes of the elements that this member passes.
std::uint64_t bytes_of(const OperationRequest& request) {
  std::uint64_t bytes = 0;
  for (const collective::ArrayRef& array : request.arrays)
    bytes += array.count * element_size(array.dtype);
  return collective::scatters(request.kind) ? bytes * request.parts : bytes;
}

std::uint64_t signature_hash(const OperationRequest& request, const PeerId& root,
                             std::uint64_t plan_hash) {
  wire::Bytes bytes;
  bytes.reserve(64 + 16 * request.arrays.size());
  wire::Writer writer(bytes);
  writer(static_cast<std::uint8_t>(request.op), request.rerun, request.structure, plan_hash);
  writer(static_cast<std::uint8_t>(request.kind));
  if (request.kind == collective::Kind::broadcast) writer(root);
  const reduce::Quantization& how = request.quantization;
  writer(static_cast<std::uint8_t>(how.code), how.zero_exact, how.stochastic, how.block);
  for (const collective::ArrayRef& array : request.arrays) {
    writer(array.count, static_cast<std::uint8_t>(array.dtype));
  }
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace

// -- starting

void Operations::start(const CallPtr& call, OperationRequest request, Instant now) {
  if (request.view == nullptr) request.view = record();
  // A member's part of an input depends on the number of members.
  if (collective::scatters(request.kind)) request.rerun = false;
  const bool alone = record()->members.size() == 1;
  if (alone && request.alone_is_error)
    return calls_.refuse(*call, Code::too_few_peers, "this peer is alone in its group", record());
  const wire::OpKey key = table().next_operation(request.tag);
  const auto early = table().take_early(key);
  const std::vector<wire::Member>& meant = request.view->members;
  const bool broadcast = request.kind == collective::Kind::broadcast;
  const bool as_meant = request.parts == 0 || request.parts == meant.size();
  if (!early && broadcast && as_meant && request.root >= meant.size()) {
    // No other member could match this call: it takes no number.
    return calls_.refuse(*call, Code::invalid_argument,
                         "root " + std::to_string(request.root) + " is no rank: the group has " +
                             std::to_string(meant.size()) + " members",
                         record());
  }
  table().take_number(key);
  call->key = key;
  call->bytes = bytes_of(request);
  call->timing.begin(now);
  if (early) {
    executor_.forget(key);
    locality_.group().forget(key);
    return calls_.end(*call, early->error, early->record);
  }
  CallEntry& entry = table().open(key, call);
  if (broadcast && request.root < meant.size()) entry.root = meant[request.root].id;
  entry.request = std::move(request);
  if (const auto misfit = misfit_of(entry)) {
    // The caller did not know of a loss yet. Other members may have made the call before the loss,
    // which ended it for them. The call must fail the same way for all members.
    return fail_for_all(key, *misfit);
  }
  run(key, now);
  // A group of one needs no verdict.
  if (alone && entry.phase == CallPhase::finished) {
    call->count(executor_.commit(key));
    end(key, {Code::ok, {}}, record());
  }
}

// Returns why the present members cannot run the operation, with the lost member if there is one.
std::optional<Error> Operations::misfit_of(const CallEntry& operation) const {
  const OperationRequest& request = operation.request;
  const std::vector<wire::Member>& members = record()->members;
  const auto present = [&](const PeerId& id) {
    return std::any_of(members.begin(), members.end(),
                       [&](const wire::Member& member) { return member.id == id; });
  };
  if (request.kind == collective::Kind::broadcast && !present(operation.root)) {
    return Error{
        Code::peer_lost,
        "the root, peer " + wire::shown_name(request.view->members, operation.root) + ", was lost",
        operation.root,
        {}};
  }
  // The results of fewer members fit in an all-gather's arrays.
  const bool fits =
      request.rerun ? members.size() <= request.parts : members.size() == request.parts;
  if (request.parts == 0 || fits) return std::nullopt;
  Error error{Code::peer_lost,
              "the arrays are for " + std::to_string(request.parts) + " members; the group has " +
                  std::to_string(members.size()) + " members now",
              {},
              {}};
  const std::vector<wire::Member>& meant = request.view->members;
  const auto lost = std::find_if(meant.begin(), meant.end(),
                                 [&](const wire::Member& member) { return !present(member.id); });
  if (lost == meant.end()) return error;
  error.peer = lost->id;
  error.reason += ": peer " + wire::shown_name(meant, lost->id) + " was lost";
  return error;
}

// Starts an attempt among the present members.
void Operations::run(const wire::OpKey& key, Instant now) {
  CallEntry& entry = table().at(key);
  const Record& world = record();
  entry.attempt = world->epoch;
  entry.world = world;
  entry.told_attempt = entry.too_late = false;
  for (std::uint32_t rank = 0; rank < world->members.size(); ++rank) {
    if (world->members[rank].id == entry.root) entry.request.root = rank;
  }
  entry.signature = signature_hash(entry.request, entry.root, plan_hash_);
  if (++entry.call->attempts > 1) entry.call->timing.attempt(now);
  if (!locality_.active() || locality_.group().escalated(key)) return run_on_network(key, now);
  table().move(entry, CallPhase::in_memory);
  // The master must know an operation that does not run again, so that the loss of a member ends it
  // for all.
  table().tell_later(key, entry,
                     now + (entry.request.rerun ? Threads::kBlockedAfter : kEnterDelay));
  // If the master knows of an earlier attempt, it waits for the end of this one.
  const bool parts = collective::scatters(entry.request.kind);
  locality_.group().submit({key,
                            {entry.request.kind, entry.request.root},
                            parts ? world->members.size() : 1,
                            entry.signature,
                            entry.request.op,
                            entry.request.arrays,
                            entry.told.has_value()});
}

void Operations::run_on_network(const wire::OpKey& key, Instant now) {
  CallEntry& entry = table().at(key);
  const Record world = entry.world;
  table().move(entry, CallPhase::on_network);
  table().tell_later(key, entry, now + kEnterDelay);
  collective::OperationSpec spec;
  spec.key = key;
  spec.attempt = entry.attempt;
  spec.signature = static_cast<std::uint32_t>(entry.signature);
  spec.what = {entry.request.kind, entry.request.root};
  spec.op = entry.request.op;
  if (world->members.size() > 1 && !topology::on_one_host(world->plan))
    spec.quantization = entry.request.quantization;
  spec.arrays = entry.request.arrays;
  spec.world = world;
  for (std::uint32_t rank = 0; rank < world->members.size(); ++rank) {
    if (world->members[rank].id == session_.id()) spec.rank = rank;
  }
  const Status started = executor_.start(std::move(spec));
  handle_executor(now);
  if (!started) fail_for_all(key, started.error());
}

// -- ending

// Does nothing for an operation that runs in memory: the executor has no attempt of it.
void Operations::stop(const wire::OpKey& key) {
  table().at(key).call->count(executor_.cancel(key));
}

void Operations::stop_all() {
  for (const wire::OpKey& key : table().operations()) stop(key);
}

void Operations::end(const wire::OpKey& key, Error error, const Record& record) {
  const CallPtr call = table().at(key).call;
  stop(key);
  executor_.forget(key);  // frames for an operation that never started here
  locality_.group().forget(key);
  table().end(key);
  calls_.end(*call, std::move(error), record);
}

// Asks the master to end the operation for all members, including those that call it later. The
// master may have received another reason first; all members get the same one. An `error` with a
// code other than peer_lost is this peer's own failure, which the others see as interrupted.
void Operations::fail_for_all(const wire::OpKey& key, const Error& error) {
  CallEntry& entry = table().at(key);
  entry.why = error;
  table().move(entry, CallPhase::failed);
  const bool lost = error.code == Code::peer_lost;
  calls_.request_abort(key, lost ? error.code : Code::interrupted, lost ? error.peer : PeerId{});
}

Status Operations::on_verdict(const wire::Verdict& verdict) {
  const wire::OpKey& key = verdict.key;
  Error error{verdict.code, verdict.reason, verdict.culprit, verdict.waiting};
  table().close_at_master(key);
  CallEntry* const entry = table().find(key);
  if (entry == nullptr || entry->call == nullptr) {
    if (verdict.code == Code::ok) return {};
    table().hear(key, {std::move(error), record()});
    executor_.forget(key);
    return {};
  }
  if (verdict.code == Code::ok) {
    admission_.on_commit(verdict.admission_due);
    if (entry->phase != CallPhase::finished) {
      return Status(Code::internal_error,
                    "the master committed an operation that is not done here");
    }
    entry->call->count(executor_.commit(key));
    end(key, {Code::ok, {}}, record());
    return {};
  }
  // After a commit in memory the verdict is too late: all members follow the commit.
  if (entry->phase == CallPhase::in_memory && !locality_.group().withdraw(key)) {
    entry->too_late = true;
    return {};
  }
  // The peer that failed reports its own error, which has more detail than the verdict.
  const auto& why = entry->why;
  if (why && why->code != Code::peer_lost && verdict.culprit == session_.id()) error = *why;
  end(key, std::move(error), record());
  return {};
}

// -- epochs

void Operations::end_attempts(const Record& record) {
  for (const wire::OpKey& key : record->aborted) {
    table().close_at_master(key);
    const CallEntry* const entry = table().find(key);
    if (entry != nullptr && entry->call != nullptr) {
      end(key, loss_error(*record), record);
    } else {
      table().hear(key, {loss_error(*record), record});
    }
  }
  for (const wire::OpKey& key : table().operations()) {
    CallEntry& entry = table().at(key);
    if (entry.phase == CallPhase::failed) continue;  // its verdict is outstanding
    stop(key);
    table().move(entry, CallPhase::called);
    if (record->members.size() > 1 || !entry.request.alone_is_error) continue;
    // This peer may have reported the operation after the master began this epoch: the master may
    // have taken that for a new call.
    if (entry.told) calls_.request_abort(key, Code::peer_lost);
    end(key, {Code::too_few_peers, "all other members are gone"}, record);
  }
  table().renew_reports(record->epoch);
}

void Operations::begin_epoch(const Record& record) {
  plan_hash_ = topology::hash(record->plan);
  executor_.set_epoch(record->epoch, record->abort_floor, record->admission);
}

void Operations::run_all(Instant now) {
  // Calls made before a loss and not reported to the master by then end for all members.
  std::vector<std::pair<wire::OpKey, Error>> lost;
  for (const wire::OpKey& key : table().operations()) {
    const CallEntry& entry = table().at(key);
    if (entry.phase != CallPhase::called) continue;
    const bool loss = record()->cause == wire::Cause::loss;
    if (const auto misfit = misfit_of(entry)) {
      lost.emplace_back(key, *misfit);
    } else if (loss && !entry.request.rerun) {
      lost.emplace_back(key, loss_error(*record()));
    } else {
      run(key, now);
    }
  }
  for (const auto& [key, error] : lost) fail_for_all(key, error);
}

// -- reports

void Operations::report_entered(Instant now, bool all) {
  std::vector<wire::OpState> states;
  for (const wire::OpKey& key : table().take_due(now, all)) {
    CallEntry& entry = table().at(key);
    if (entry.told_attempt || !entry.runs()) continue;
    if (entry.phase == CallPhase::in_memory && !locality_.group().tell(key)) continue;
    states.push_back(table().tell(key, entry, wire::OpPhase::entered));
  }
  session_.report(states);
}

void Operations::handle_executor(Instant now) {
  const collective::ExecutorEvents events = executor_.take_events();
  const auto running = [&](const wire::OpKey& key) {
    CallEntry* const entry = table().find(key);
    return entry != nullptr && entry->phase == CallPhase::on_network ? entry : nullptr;
  };
  for (const wire::OpKey& key : events.met) {
    if (const CallEntry* const entry = running(key)) entry->call->timing.met(now);
  }
  for (const wire::OpKey& key : events.finished) {
    CallEntry* const entry = running(key);
    if (entry == nullptr) continue;
    entry->call->timing.finished(now);
    table().finish(key, *entry);
  }
  if (events.disagreement) report_entered(now, true);
}

bool Operations::was_called(const wire::OpKey& key) const {
  if (!record()) return true;
  // An operation in memory may still move to the network. Other members may be there already.
  const CallEntry* const entry = calls_.table().find(key);
  if (entry != nullptr && entry->phase == CallPhase::in_memory) return false;
  return calls_.table().was_called(key);
}

// -- in memory

void Operations::on_local_commit(const LocalCommit& commit) {
  const auto& [key, traffic, admission_due, told, met, done] = commit;
  admission_.on_commit(admission_due);
  CallEntry& entry = table().at(key);
  const CallPtr call = entry.call;
  const Record world = entry.world;
  if (told && !entry.too_late) {  // otherwise the master would open the operation again
    (void)table().tell(key, entry, wire::OpPhase::done);
    table().tell_done(key);
  }
  call->count(traffic);
  call->timing.met(met.value_or(calls_.now()));
  call->timing.finished(done.value_or(calls_.now()));
  table().end(key);
  calls_.end(*call, {Code::ok, {}}, world);
}

void Operations::on_local_escalation(const wire::OpKey& key, Instant now) {
  const CallEntry* const entry = table().find(key);
  if (entry != nullptr && entry->phase == CallPhase::in_memory) return run_on_network(key, now);
  // A verdict may have ended it here before the members of this host moved it to the network.
  const bool over = entry == nullptr || entry->phase == CallPhase::over;
  if (over && table().was_called(key)) locality_.group().forget(key);
}

bool Operations::in_memory_alone(const wire::CallKey& key) const {
  const CallEntry* const entry = calls_.table().find(key);
  return entry != nullptr && entry->phase == CallPhase::in_memory && !entry->told_attempt;
}

}  // namespace pccl::peer
