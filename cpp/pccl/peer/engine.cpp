#include "pccl/peer/engine.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "pccl/base/text.h"
#include "pccl/topology/plan.h"

namespace pccl::peer {
namespace {

// A small operation is done before the master needs to hear that it began: the entry is reported
// only after this.
constexpr Duration kEnterDelay = std::chrono::milliseconds(1);
constexpr Duration kAbortGrace = std::chrono::seconds(1);  // for a verdict after giving up
constexpr std::uint32_t kMaxSyncTries = 8;

constexpr std::string_view kAllReduce = "allreduce";

template <class... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

// For errors: "allreduce of float32[3], sum", "all_gather of float32[3]".
std::string described(const OperationRequest& request) {
  std::string text = request.description;
  if (request.kind != collective::Kind::all_reduce) {
    text = std::string(collective::name(request.kind)) + " of " + text;
  } else if (!text.starts_with(kAllReduce)) {  // as that of a call in a compiled program does
    text = std::string(kAllReduce) + " of " + text;
  }
  if (request.kind == collective::Kind::broadcast)
    text += ", from rank " + std::to_string(request.root);
  if (collective::reduces(request.kind)) text += std::string(", ") + name(request.op);
  return text;
}

std::uint64_t signature_hash(const OperationRequest& request, const PeerId& root,
                             std::uint64_t plan_hash) {
  wire::Bytes bytes;
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

Engine::Engine(const EngineOptions& options, std::shared_ptr<BufferPool> pool)
    : options_(options),
      session_(options.join),
      master_link_(options.settings),
      links_({options.join.id, options.settings, options.stripes, options.stripe_budget,
              options.encrypted},
             *this),
      executor_({.buffer_bytes = options.settings.buffer_bytes,
                 .eager_bytes = options.eager_bytes,
                 .eager_room = options.eager_room},
                pool, links_),
      transfer_(std::move(pool), links_),
      locality_(options.locality, options.join.id),
      asked_(options.join.waiting) {}

Engine::~Engine() = default;

Standing Engine::standing() const {
  if (out_) return Standing::out;
  if (session_.member()) return Standing::member;
  return master_link_.was_reached() && !asked_ ? Standing::newcomer : Standing::joining;
}

// ---- the control connection
// ---------------------------------------------------------------------------------------

void Engine::start(Instant now) {
  now_ = now;
  last_tick_ = now;
  next_tick_ = now;
  master_link_.start(now);
  on_time(now);
}

void Engine::on_control_open(Instant now) {
  now_ = now;
  if (out_) return;
  master_link_.on_open(now);
  session_.on_open();
}

void Engine::on_control_bytes(std::span<const std::uint8_t> bytes, Instant now) {
  now_ = now;
  if (out_ || !master_link_.is_open()) return;
  master_link_.on_heard(now);
  session_.on_bytes(bytes);
  for (;;) {
    const Session::Next event = session_.next();
    if (!event) {
      const std::string& why = event.error().reason;
      if (!master_link_.was_reached())
        return die({Code::refused, "this is no pccl master: " + why, {}, {}});
      actions_.close_control = true;
      return on_control_lost(why, now);
    }
    if (!*event) return;
    hear(**event);
    if (out_) return;
  }
}

void Engine::hear(const SessionEvent& event) {
  std::visit(Overloaded{
                 [&](const Welcomed& welcomed) { on_welcome(welcomed); },
                 [&](const NewEpoch& epoch) { on_epoch(epoch.record); },
                 [&](const wire::Verdict& verdict) { on_verdict(verdict); },
                 [&](const wire::Outcome& outcome) { on_outcome(outcome); },
                 [&](const wire::Prepare& prepare) { on_prepare(prepare); },
                 [&](const wire::Expect& expect) { on_expect(expect); },
                 [&](const wire::Notice& notice) { log(LogLevel::warn, notice.text); },
                 [&](const wire::Try& question) { on_try(question); },
                 [&](const wire::Relay& relay) { on_relay(relay); },
                 [&](const Dismissed& dismissed) {
                   log(LogLevel::debug,
                       "the master ended our part in the run: " + dismissed.error.reason);
                   die(dismissed.error);
                 },
             },
             event);
}

void Engine::on_control_lost(const std::string& reason, Instant now) {
  now_ = now;
  if (out_) return;
  const bool broke = master_link_.on_lost(reason, session_.welcomed(), now);
  session_.on_lost();
  if (!broke) return;
  threads_.told(false);
  log(LogLevel::info, "the connection to the master broke (" + reason + "); dialling again");
}

void Engine::on_stranger_at_master(const std::string& reason, Instant now) {
  now_ = now;
  if (master_link_.was_reached() || out_) return on_control_lost(reason, now);
  die({Code::authentication_failed, reason, {}, {}});
}

void Engine::on_welcome(const Welcomed& welcomed) {
  const wire::Welcome& welcome = welcomed.welcome;
  master_link_.on_welcome();
  joined_ = welcome.joined;
  if (welcomed.again) session_.say_again(calls_.open_messages());
  if (session_.member()) {
    if (welcomed.again) log(LogLevel::info, "back at the master");
    // The master may not have heard of the links, or be another one.
    for (const link::LinkReport& report : links_.report_all(link_context()))
      session_.report_link(report.peer, report.state, report.reason);
    return;
  }
  prepared_epoch_ = 0;
  waiting_for_ = welcome.waiting_for;
  // Each Join says anew whether we wait; the answer says whether there was a start to wait for.
  asked_ =
      requested_ || (options_.join.waiting && !(options_.join.start_only && welcome.group_started));
}

void Engine::request_admission(Instant now) {
  now_ = now;
  if (out_ || session_.member() || requested_) return;
  requested_ = true;
  asked_ = true;
  session_.request_admission();
}

void Engine::withdraw_admission(Instant now) {
  now_ = now;
  if (out_ || session_.member() || !requested_) return;
  requested_ = false;
  asked_ = false;
  prepare_.reset();
  prepared_epoch_ = 0;
  session_.withdraw_admission();
  choose_links();
}

void Engine::leave(const std::string& reason, Instant now) {
  now_ = now;
  if (out_) return;
  session_.leave(reason);
  die({Code::invalid_usage, "the communicator is closed", {}, {}});
}

void Engine::fail(const std::string& what) {
  if (out_) return;
  session_.leave("it failed: " + what);
  die({Code::internal_error, "the engine failed: " + what, {}, {}});
}

// The peer's part in the run is over: every call ends with `error`, every connection is closed.
void Engine::die(Error error) {
  if (out_) return;
  // What is committed in memory is committed, also for us. What cannot be had any more is lost.
  try {
    (void)locality_.close_group();
    locality_told();
  } catch (const std::exception& failure) {
    error.reason += std::string("; ") + failure.what();
  }
  out_ = true;
  end_ = std::move(error);
  for (const wire::OpKey& key : calls_.operations()) stop_attempt(key);
  if (sync_) end_sync(end_, session_.record());
  if (optimizing_) end_optimize(end_, session_.record());
  const std::vector<CallPtr> calls = calls_.calls();
  calls_.clear();
  for (const CallPtr& call : calls) end_call(*call, end_, session_.record());
  links_.close_all(link_context());
  master_link_.close();
  session_.stop();
  actions_.close_control = true;
  actions_.calls_ended = true;
}

void Engine::tell_changes() {
  for (std::string& line : news_.take()) log(LogLevel::warn, std::move(line));
}

// ---- epochs
// -------------------------------------------------------------------------------------------------------

void Engine::on_epoch(const Record& record) {
  if (out_) return;
  // First of all: what was committed in memory is committed, whatever this epoch says.
  const bool whole = locality_.close_group();
  locality_told();
  if (!whole) {
    return die({Code::internal_error,
                "the result of an operation in shared memory was lost with its owner",
                {},
                {}});
  }
  census_ = record->census;
  news_.note(*record);
  if (!calls_.calls().empty()) tell_changes();
  if (record->cause == wire::Cause::admission) {
    begin_admission(record);
  } else {
    end_attempts(record);
  }
  transfer_.set_members(record->members);
  transfer_told();
  prober_.keep(record->members);
  plan_hash_ = topology::hash(record->plan);
  live_rates_.forget();
  locality_.begin_epoch(record);
  locality_told();
  executor_.set_epoch(record->epoch, record->abort_floor, record->admission);
  links_.begin_epoch(link_context());
  choose_links();
  actions_.resume = links_.held_stripes();
  // Calls that were made before a loss, and that the master had not heard of, end for all members.
  std::vector<std::pair<wire::OpKey, Error>> lost;
  for (const wire::OpKey& key : calls_.operations()) {
    const CallEntry& entry = calls_.at(key);
    if (entry.phase != CallPhase::called) continue;
    const bool loss = record->cause == wire::Cause::loss;
    if (const auto misfit = misfit_of(entry)) {
      lost.emplace_back(key, *misfit);
    } else if (loss && !entry.request.rerun) {
      lost.emplace_back(key, loss_error(*record));
    } else {
      run_attempt(key);
    }
  }
  for (const auto& [key, error] : lost) fail_for_all(key, error);
  actions_.calls_ended = true;  // somebody may wait to be let in
}

// All members have entered the admit round: numbers of calls begin anew. A call of another thread
// that was under way has lost its number.
void Engine::begin_admission(const Record& record) {
  const bool new_here = !was_member_;
  was_member_ = true;
  asked_ = false;
  waiting_for_ = 0;
  prepare_.reset();
  newcomers_wait_.reset();
  if (new_here) {
    fresh_ = true;
    member_since_ = record->epoch;
    admitted_ = record;
  }
  owes_sync_ = new_here && record->syncing;
  const Error late{
      Code::invalid_usage, "newcomers were let in while this call was under way", {}, {}};
  for (const wire::OpKey& key : calls_.operations()) stop_attempt(key);
  if (sync_) end_sync(late, record);
  if (optimizing_) end_optimize(late, record);
  const std::vector<CallPtr> calls = calls_.calls();
  calls_.begin_admission(record->admission);
  for (const CallPtr& call : calls) {
    const auto* round = std::get_if<wire::RoundKey>(&call->key);
    const bool admitting = round != nullptr && (round->kind == wire::RoundKind::admit ||
                                                round->kind == wire::RoundKind::sync_admit);
    end_call(*call, admitting ? Error{Code::ok, {}, {}, {}} : late, record);
  }
  transfer_.forget_before(record->admission);
}

// The epoch has fewer members, or another plan: ends what it aborts, and every attempt.
void Engine::end_attempts(const Record& record) {
  for (const wire::OpKey& key : record->aborted) {
    calls_.close_at_master(key);
    const CallEntry* const entry = calls_.find(key);
    if (entry != nullptr && entry->call != nullptr) {
      end_operation(key, loss_error(*record), record);
    } else {
      calls_.hear(key, {loss_error(*record), record});
    }
  }
  for (const wire::OpKey& key : calls_.operations()) {
    CallEntry& entry = calls_.at(key);
    if (entry.phase == CallPhase::failed) continue;  // its verdict is still to come
    stop_attempt(key);
    calls_.move(entry, CallPhase::called);
    if (record->members.size() > 1 || !entry.request.alone_is_error) continue;
    // Reported before this epoch was known here: the master may have taken it for a new call.
    if (entry.told) request_abort(key, Code::peer_lost);
    end_operation(key, {Code::too_few_peers, "all other members are gone", {}, {}}, record);
  }
  calls_.renew_reports(record->epoch);
}

// ---- calls
// --------------------------------------------------------------------------------------------------------

CallPtr Engine::enter(wire::RoundKind kind, Instant now, wire::RoundPayload payload) {
  now_ = now;
  auto call = std::make_shared<Call>();
  if (out_) {
    end_call(*call, end_, nullptr);
    return call;
  }
  if (!session_.member()) {
    end_call(*call, {Code::invalid_usage, "not a member of the run", {}, {}}, nullptr);
    return call;
  }
  fresh_ = false;
  tell_changes();
  const wire::RoundKey key = calls_.next_round(kind);
  call->key = key;
  if (const auto early = calls_.take_early(key)) {
    end_call(*call, early->error, early->record);
    return call;
  }
  enter_round(call, key, std::move(payload));
  return call;
}

void Engine::enter_round(const CallPtr& call, const wire::RoundKey& key,
                         wire::RoundPayload payload) {
  CallEntry* entry = calls_.find(key);
  if (entry == nullptr) entry = &calls_.open(key, call);
  entry->entered = payload;
  session_.enter(key, std::move(payload));
}

// ---- shared state
// -----------------------------------------------------------------------------------------------

CallPtr Engine::start_sync(SyncRequest request, Instant now) {
  now_ = now;
  auto call = std::make_shared<Call>();
  if (out_) {
    end_call(*call, end_, nullptr);
    return call;
  }
  if (!session_.member() || sync_) {
    end_call(
        *call,
        {Code::invalid_usage,
         sync_ ? "another thread is in a sync of this communicator" : "not a member of the run",
         {},
         {}},
        nullptr);
    return call;
  }
  fresh_ = false;
  tell_changes();
  owes_sync_ = false;
  const std::vector<wire::StateEntry>& entries = request.state->manifest.entries;
  request.vote.structure = state::structure_of(entries);
  request.vote.content = state::content_of(entries, false);
  request.vote.loose = state::content_of(entries, true);
  request.vote.member_since = member_since_;
  request.vote.worked_since = worked_since_;
  sync_.emplace(Sync{});
  sync_->call = call;
  sync_->request = std::move(request);
  begin_sync();
  return call;
}

// Votes; also again, when all who had the elected state are gone.
void Engine::begin_sync() {
  const std::uint64_t sequence = calls_.next_round(wire::RoundKind::sync).sequence;
  calls_.skip_rounds(wire::RoundKind::sync_detail, sequence + 1);
  calls_.skip_rounds(wire::RoundKind::sync_end, sequence + 1);
  sync_->id = {record()->admission, sequence};
  ++sync_->tries;
  sync_->question.reset();
  sync_->unanswered = sync_->complete = false;
  enter_sync(wire::RoundKind::sync, sync_->request.vote);
}

void Engine::enter_sync(wire::RoundKind kind, wire::RoundPayload payload) {
  if (!move_sync_to(kind)) return;
  const wire::RoundKey key{kind, sync_->id.admission, sync_->id.sequence};
  enter_round(sync_->call, key, std::move(payload));
}

// The sync waits for its next round now. False when that is over already, and with it the sync.
bool Engine::move_sync_to(wire::RoundKind kind) {
  const auto early = move_round_to(sync_->call, {kind, sync_->id.admission, sync_->id.sequence});
  if (early) end_sync(early->error, early->record);
  return !early;
}

// The call waits for that round now. Returns how the round ended, if it is over already.
std::optional<Decision> Engine::move_round_to(const CallPtr& call, const wire::RoundKey& next) {
  const wire::CallKey key = next;
  const wire::CallKey before = std::exchange(call->key, key);
  if (auto early = calls_.take_early(key)) return early;
  if (calls_.find(key) == nullptr) (void)calls_.open(key, call);
  // The caller gave up while the round before was decided.
  if (call->gave_up && before != key) request_abort(key, call->gave_up->second);
  return std::nullopt;
}

void Engine::on_sync_outcome(const wire::Outcome& outcome, const Error& error) {
  if (error.code != Code::ok) {
    (void)end_transfer();
    return end_sync(error, record());
  }
  Sync& sync = *sync_;
  switch (outcome.sync.step) {
    case wire::SyncStep::none:
      return end_sync({Code::internal_error, "the master closed a sync without a decision", {}, {}},
                      record());
    case wire::SyncStep::detail:
      return enter_sync(wire::RoundKind::sync_detail,
                        wire::SyncDetail{sync.request.vote, sync.request.state->manifest.entries});
    case wire::SyncStep::transfer: {
      if (!move_sync_to(wire::RoundKind::sync_end)) return;
      transfer_.begin(sync.id, id(), sync.request.state, outcome.sync);
      choose_links();
      transfer_told();
      if (!sync_) return;
      // Those who only serve are done; the round waits for those who receive.
      if (!transfer_.receiving()) transfer_over(Code::ok, {});
      return;
    }
    case wire::SyncStep::again: {
      const std::unique_ptr<state::Update> update = end_transfer();
      if (update) {
        sync.tx_bytes += update->tx_bytes;
        sync.rx_bytes += update->rx_bytes;
      }
      return begin_sync();
    }
    case wire::SyncStep::done: {
      std::unique_ptr<state::Update> update = end_transfer();
      if (!update) {
        update = std::make_unique<state::Update>();
        update->decision = outcome.sync;
      }
      update->decision.revision = outcome.sync.revision;
      update->tx_bytes += sync.tx_bytes;
      update->rx_bytes += sync.rx_bytes;
      sync.call->update = std::move(update);
      return end_sync({Code::ok, {}, {}, {}}, record());
    }
  }
}

void Engine::transfer_told() {
  const state::TransferEvents events = transfer_.take_events();
  if (events.planned) transfer_planned();
  if (events.over) transfer_over(events.over->code, events.over->reason);
}

void Engine::transfer_planned() {
  if (!sync_ || !sync_->request.questions) return;
  std::vector<wire::StateEntry> entries = transfer_.replacements();
  if (entries.empty()) return;
  sync_->question = std::move(entries);
  sync_->unanswered = true;
  sync_->call->asks.store(true, std::memory_order_release);
  actions_.calls_ended = true;
}

std::vector<wire::StateEntry> Engine::take_question(const CallPtr& call) {
  call->asks.store(false, std::memory_order_release);
  if (!sync_ || sync_->call != call || !sync_->question) return {};
  std::vector<wire::StateEntry> entries = std::move(*sync_->question);
  sync_->question.reset();
  return entries;
}

void Engine::answer(const CallPtr& call, const Error& error, Instant now) {
  now_ = now;
  // Or it has another question already.
  if (out_ || !sync_ || sync_->call != call || !sync_->unanswered || sync_->question) return;
  sync_->unanswered = false;
  if (error.code != Code::ok) {
    transfer_.stop();
    return transfer_over(error.code, error.reason);
  }
  if (std::exchange(sync_->complete, false)) transfer_over(Code::ok, {});
}

// The transfer's part is over: says so in the last round.
void Engine::transfer_over(Code code, const std::string& reason) {
  if (!sync_) return;
  if (code == Code::ok && sync_->unanswered) {
    sync_->complete = true;
    return;
  }
  sync_->unanswered = false;
  wire::SyncEnd end{code, reason, 0, {}, {}};
  const wire::SyncDecision& decision = transfer_.decision();
  if (code == Code::peer_lost) end.lost = state::sources_of(decision, id());
  end.revision = decision.revision;
  end.content = decision.content;
  if (code == Code::peer_lost && sync_->tries >= kMaxSyncTries) end.code = Code::state_unavailable;
  enter_sync(wire::RoundKind::sync_end, std::move(end));
}

// Null: there was none. The links that only it needed may go.
std::unique_ptr<state::Update> Engine::end_transfer() {
  std::unique_ptr<state::Update> update = transfer_.end();
  if (update) choose_links();
  return update;
}

void Engine::end_sync(Error error, const Record& record) {
  const CallPtr call = sync_->call;
  sync_.reset();
  (void)transfer_.end();
  calls_.end(call->key);
  end_call(*call, std::move(error), record);
}

// ---- measuring
// -----------------------------------------------------------------------------------------------

CallPtr Engine::start_optimize(Instant now) {
  now_ = now;
  auto call = std::make_shared<Call>();
  if (out_) {
    end_call(*call, end_, nullptr);
    return call;
  }
  if (!session_.member() || optimizing_) {
    const char* const why = optimizing_
                                ? "another thread is in an optimize_topology of this communicator"
                                : "not a member of the run";
    end_call(*call, {Code::invalid_usage, why, {}, {}}, nullptr);
    return call;
  }
  fresh_ = false;
  tell_changes();
  // Two rounds: in the first one members meet, to the second they bring what they have measured.
  const wire::RoundKey key = calls_.next_round(wire::RoundKind::optimize);
  calls_.skip_rounds(wire::RoundKind::optimize, key.sequence + 2);
  call->key = key;
  optimizing_.emplace(Optimizing{});
  optimizing_->call = call;
  enter_optimize(key, wire::Nothing{});
  return call;
}

void Engine::enter_optimize(const wire::RoundKey& key, wire::RoundPayload payload) {
  if (const auto early = move_round_to(optimizing_->call, key))
    return end_optimize(early->error, early->record);
  enter_round(optimizing_->call, key, std::move(payload));
}

void Engine::on_optimize_outcome(const Error& error) {
  if (error.code != Code::ok) return end_optimize(error, record());
  if (optimizing_->phase == Optimizing::Phase::meeting) return begin_measuring();
  end_optimize({Code::ok, {}, {}, {}}, record());
}

void Engine::begin_measuring() {
  wire::RoundKey key = optimizing_->key();
  ++key.sequence;
  if (const auto early = move_round_to(optimizing_->call, key))
    return end_optimize(early->error, early->record);
  optimizing_->phase = Optimizing::Phase::measuring;
  // Memory is faster than any wire. A large group has no time to measure all pairs.
  constexpr std::size_t kMostProbed = 32;
  const bool all = record()->members.size() <= kMostProbed;
  std::vector<PeerId> peers;
  for (const wire::Member& member : record()->members) {
    if (member.id == id() || locality_.shares_with(member.id)) continue;
    if (all || links_.contains(member.id)) peers.push_back(member.id);
  }
  if (peers.empty() || locality_.active()) return tell_measurements();
  prober_.begin(peers, options_.probe_bytes, now_);
  optimizing_->probed.insert(peers.begin(), peers.end());
  links_.begin_probe();
  choose_links();
  for (const PeerId& peer : peers) links_.wake(peer);
}

void Engine::tell_measurements() {
  wire::Measurements row = prober_.row();
  // A planned link that is down is reported as such; of others only who dials knows. One that was
  // up at any time works.
  for (const wire::Member& member : record()->members) {
    if (!prober_.probes(member.id) || prober_.answered(member.id)) continue;
    if (links_.never_worked(member.id, link_context()))
      row.links.push_back({member.id, {true, 0, 0}});
  }
  prober_.end();
  optimizing_->phase = Optimizing::Phase::telling;
  // Links that the plan does without are kept: others may measure yet.
  enter_optimize(optimizing_->key(), std::move(row));
}

void Engine::end_optimize(Error error, const Record& record) {
  const CallPtr call = optimizing_->call;
  const bool probed = !optimizing_->probed.empty();
  optimizing_.reset();
  prober_.end();
  calls_.end(call->key);
  end_call(*call, std::move(error), record);
  if (probed && !out_) choose_links();
}

// As `enter`, but nobody has to come there any more.
CallPtr Engine::give_up(wire::RoundKind kind, Code code, Instant now) {
  now_ = now;
  auto call = std::make_shared<Call>();
  if (out_ || !session_.member() || (sync_ && kind == wire::RoundKind::sync)) {
    end_call(*call, {code, "given up", {}, {}}, session_.record());
    return call;
  }
  fresh_ = false;
  tell_changes();
  const wire::RoundKey key = calls_.next_round(kind);
  const std::uint64_t next = key.sequence + 1;
  if (kind == wire::RoundKind::optimize) calls_.skip_rounds(kind, next + 1);  // see start_optimize
  if (kind == wire::RoundKind::sync) {
    owes_sync_ = false;
    calls_.skip_rounds(wire::RoundKind::sync_detail, next);
    calls_.skip_rounds(wire::RoundKind::sync_end, next);
  }
  call->key = key;
  if (const auto early = calls_.take_early(key)) {
    end_call(*call, early->error, early->record);
    return call;
  }
  (void)calls_.open(key, call);
  abort(call, code, now);
  return call;
}

// Why the present members cannot do it, and without whom.
std::optional<Error> Engine::misfit_of(const CallEntry& operation) const {
  const OperationRequest& request = operation.request;
  const std::vector<wire::Member>& members = record()->members;
  const auto present = [&](const PeerId& id) {
    return std::any_of(members.begin(), members.end(),
                       [&](const wire::Member& member) { return member.id == id; });
  };
  if (request.kind == collective::Kind::broadcast && !present(operation.root)) {
    return Error{Code::peer_lost, "the root was lost", operation.root, {}};
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
  if (lost != meant.end()) error.peer = lost->id;
  return error;
}

CallPtr Engine::start_operation(OperationRequest request, Instant now) {
  now_ = now;
  auto call = std::make_shared<Call>();
  if (out_) {
    end_call(*call, end_, nullptr);
    return call;
  }
  if (!session_.member()) {
    end_call(*call, {Code::invalid_usage, "not a member of the run", {}, {}}, nullptr);
    return call;
  }
  fresh_ = false;
  tell_changes();
  if (request.view == nullptr) request.view = record();
  // A member's part of a reduction depends on how many there are.
  if (request.kind == collective::Kind::reduce_scatter) request.rerun = false;
  const bool alone = record()->members.size() == 1;
  if (alone && request.alone_is_error) {
    end_call(*call, {Code::too_few_peers, "this peer is alone in its group", {}, {}}, record());
    return call;
  }
  const wire::OpKey key = calls_.next_operation(request.tag);
  const auto early = calls_.take_early(key);
  const std::vector<wire::Member>& meant = request.view->members;
  const bool as_meant = request.parts == 0 || request.parts == meant.size();
  if (!early && request.kind == collective::Kind::broadcast && as_meant &&
      request.root >= meant.size()) {
    // Not a call that the others could meet.
    const std::string members = std::to_string(meant.size());
    end_call(*call,
             {Code::invalid_argument,
              "root " + std::to_string(request.root) + " is no rank: the group has " + members +
                  " members",
              {},
              {}},
             record());
    return call;
  }
  calls_.take_number(key);
  call->key = key;
  if (early) {
    executor_.forget(key);
    end_call(*call, early->error, early->record);
    return call;
  }
  CallEntry& entry = calls_.open(key, call);
  if (request.kind == collective::Kind::broadcast && request.root < meant.size())
    entry.root = meant[request.root].id;
  entry.request = std::move(request);
  if (const auto misfit = misfit_of(entry)) {
    // Made before its caller knew of a loss. Others may have called it before that, too, and have
    // it ended by the loss: it fails once for all.
    fail_for_all(key, *misfit);
    return call;
  }
  run_attempt(key);
  if (alone && entry.phase == CallPhase::finished) {
    // Nobody else to agree with.
    call->count(executor_.commit(key));
    end_operation(key, {Code::ok, {}, {}, {}}, record());
  }
  return call;
}

// Starts the operation among the present members.
void Engine::run_attempt(const wire::OpKey& key) {
  CallEntry& entry = calls_.at(key);
  const Record& world = record();
  entry.attempt = world->epoch;
  entry.world = world;
  entry.told_attempt = false;
  for (std::uint32_t rank = 0; rank < world->members.size(); ++rank) {
    if (world->members[rank].id == entry.root) entry.request.root = rank;
  }
  entry.signature = {signature_hash(entry.request, entry.root, plan_hash_),
                     described(entry.request)};
  ++entry.call->attempts;
  const bool local = entry.request.kind == collective::Kind::all_reduce && locality_.active() &&
                     !locality_.group().escalated(key);
  if (!local) return run_on_network(key);
  calls_.move(entry, CallPhase::in_memory);
  // An operation that does not run again must be known to the master when a member is lost, so that
  // it ends for all.
  calls_.tell_later(key, entry,
                    now_ + (entry.request.rerun ? Threads::kBlockedAfter : kEnterDelay));
  // The master may have heard of an earlier attempt. Then it waits for the end of this one.
  locality_.group().submit(
      {key, entry.signature.hash, entry.request.op, entry.request.arrays, entry.told.has_value()});
}

void Engine::run_on_network(const wire::OpKey& key) {
  CallEntry& entry = calls_.at(key);
  const Record world = entry.world;
  calls_.move(entry, CallPhase::on_network);
  calls_.tell_later(key, entry, now_ + kEnterDelay);
  collective::OperationSpec spec;
  spec.key = key;
  spec.attempt = entry.attempt;
  spec.signature = static_cast<std::uint32_t>(entry.signature.hash);
  spec.what = {entry.request.kind, entry.request.root};
  spec.op = entry.request.op;
  if (world->members.size() > 1 && !topology::on_one_host(world->plan))
    spec.quantization = entry.request.quantization;
  spec.arrays = entry.request.arrays;
  spec.world = world;
  for (std::uint32_t rank = 0; rank < world->members.size(); ++rank) {
    if (world->members[rank].id == id()) spec.rank = rank;
  }
  const Status started = executor_.start(std::move(spec));
  executor_told();
  if (!started) fail_for_all(key, started.error());
}

// Its arrays are used no more when this returns. Nothing is there while it runs in memory.
void Engine::stop_attempt(const wire::OpKey& key) {
  calls_.at(key).call->count(executor_.cancel(key));
}

void Engine::request_abort(const wire::CallKey& key, Code code, const PeerId& lost) {
  const wire::AbortRequest request{key, code, lost};
  if (CallEntry* const entry = calls_.find(key)) entry->abort = request;
  session_.request_abort(request);
}

// Ends it for all members, those that call it later included. The master decides: it may have heard
// of another reason first, and all members are told the same. `error` with another code than
// peer_lost is this peer's own failure; the others are told that it was interrupted.
void Engine::fail_for_all(const wire::OpKey& key, const Error& error) {
  CallEntry& entry = calls_.at(key);
  entry.why = error;
  calls_.move(entry, CallPhase::failed);
  const bool lost = error.code == Code::peer_lost;
  request_abort(key, lost ? error.code : Code::interrupted, lost ? error.peer : PeerId{});
}

// Tells the master which operations were entered; those whose delay has passed, or all.
void Engine::report_entered(Instant now, bool all) {
  std::vector<wire::OpState> states;
  for (const wire::OpKey& key : calls_.take_due(now, all)) {
    CallEntry& entry = calls_.at(key);
    if (entry.told_attempt || !entry.runs()) continue;
    if (entry.phase == CallPhase::in_memory && !locality_.group().tell(key)) continue;
    states.push_back(calls_.tell(key, entry, wire::OpPhase::entered));
  }
  session_.report(states);
}

void Engine::executor_told() {
  const collective::ExecutorEvents events = executor_.take_events();
  for (const wire::OpKey& key : events.finished) {
    CallEntry* const entry = calls_.find(key);
    if (entry != nullptr && entry->phase == CallPhase::on_network) calls_.finish(key, *entry);
  }
  if (events.disagreement) report_entered(now_, true);
}

// What arrives for it after its end is of no use.
bool Engine::was_called(const wire::OpKey& key) const {
  if (!record()) return true;
  // What runs in memory may come to the network yet; others may be there before us.
  const CallEntry* const entry = calls_.find(key);
  if (entry != nullptr && entry->phase == CallPhase::in_memory) return false;
  return calls_.was_called(key);
}

std::vector<CallPtr> Engine::operation_calls() const {
  std::vector<CallPtr> calls = calls_.calls();
  std::erase_if(
      calls, [](const CallPtr& call) { return !std::holds_alternative<wire::OpKey>(call->key); });
  return calls;
}

// Each call ends once; what ended it first counts.
void Engine::end_call(Call& call, Error error, const Record& record) {
  if (call.done) return;
  const auto* operation = std::get_if<wire::OpKey>(&call.key);
  if (operation != nullptr && error.code == Code::ok && worked_since_ == 0)
    worked_since_ = operation->admission;
  call.error = std::move(error);
  call.record = record;
  call.done.store(true, std::memory_order_release);
  actions_.calls_ended = true;
}

void Engine::end_operation(const wire::OpKey& key, Error error, const Record& record) {
  const CallPtr call = calls_.at(key).call;
  stop_attempt(key);
  executor_.forget(key);  // what came for one that never started here
  calls_.end(key);
  end_call(*call, std::move(error), record);
}

void Engine::on_verdict(const wire::Verdict& verdict) {
  const wire::OpKey& key = verdict.key;
  Error error{verdict.code, verdict.reason, verdict.culprit, verdict.waiting};
  calls_.close_at_master(key);
  const CallEntry* const entry = calls_.find(key);
  if (entry == nullptr || entry->call == nullptr) {
    if (verdict.code == Code::ok) return;
    calls_.hear(key, {std::move(error), record()});
    executor_.forget(key);
    return;
  }
  if (verdict.code == Code::ok) {
    newcomers_wait_ = newcomers_wait_.value_or(false) || verdict.newcomers_wait;
    if (entry->phase != CallPhase::finished) {
      return die({Code::internal_error,
                  "the master committed an operation that is not done here",
                  {},
                  {}});
    }
    calls_.at(key).call->count(executor_.commit(key));
    return end_operation(key, {Code::ok, {}, {}, {}}, record());
  }
  // Too late when it is committed in memory: all members see that, and none this verdict.
  if (entry->phase == CallPhase::in_memory && !locality_.group().withdraw(key)) return;
  // The peer whose own failure it was knows more than the others are told.
  const auto& why = entry->why;
  if (why && why->code != Code::peer_lost && verdict.culprit == id()) error = *why;
  end_operation(key, std::move(error), record());
}

// ---- in memory
// ----------------------------------------------------------------------------------------------------

void Engine::on_neighbour_up(const PeerId& peer, Instant now) {
  now_ = now;
  if (out_) return;
  locality_.on_up(peer, now);
  locality_told();
  dial_pipes();
}

void Engine::on_neighbour_down(const PeerId& peer, const std::string& reason, Instant now) {
  if (out_) return;
  locality_.on_down(peer, reason, now);
  locality_told();
}

void Engine::on_neighbour_offer(const PeerId& peer, memory::Offer what, std::uint64_t number,
                                const memory::RegionPtr& region, Instant now) {
  if (out_) return;
  locality_.on_offered(peer, what, number, region, now);
  locality_told();
}

Pace Engine::step(Instant now) {
  if (out_) return Pace::idle;
  now_ = now;
  const Pace pace = locality_.step(now);
  locality_told();
  if (locality_.group().broken()) {
    die({Code::internal_error, "a member wrote nonsense to the memory it shares", {}, {}});
    return Pace::idle;
  }
  if (pace != Pace::idle) return pace;
  return locality_.group().fall_asleep(now) ? Pace::idle : Pace::working;
}

void Engine::locality_told() {
  for (LocalityEvent& event : locality_.take_events()) {
    std::visit(Overloaded{
                   [&](const LocalCommit& commit) { on_local_commit(commit); },
                   [&](const LocalEscalation& escalation) {
                     if (calls_.find(escalation.key) != nullptr) run_on_network(escalation.key);
                   },
                   [&](wire::Neighbourhood& near) { session_.neighbourhood(std::move(near)); },
                   [&](LocalNotice& notice) { log(notice.level, std::move(notice.text)); },
               },
               event);
  }
}

void Engine::on_local_commit(const LocalCommit& commit) {
  const auto& [key, traffic, newcomers_wait, told] = commit;
  newcomers_wait_ = newcomers_wait_.value_or(false) || newcomers_wait;
  CallEntry& entry = calls_.at(key);
  const CallPtr call = entry.call;
  const Record world = entry.world;
  if (told) {
    (void)calls_.tell(key, entry, wire::OpPhase::done);
    calls_.tell_done(key);
  }
  call->count(traffic);
  calls_.end(key);
  end_call(*call, {Code::ok, {}, {}, {}}, world);
}

void Engine::on_outcome(const wire::Outcome& outcome) {
  census_ = outcome.census;
  const wire::RoundKey& key = outcome.key;
  Error error{outcome.code, outcome.reason, outcome.culprit, outcome.waiting};
  const CallEntry* const entry = calls_.find(key);
  const CallPtr call = entry == nullptr ? nullptr : entry->call;
  if (call != nullptr) calls_.end(key);
  const bool of_sync = key.kind == wire::RoundKind::sync ||
                       key.kind == wire::RoundKind::sync_detail ||
                       key.kind == wire::RoundKind::sync_end;
  if (sync_ && of_sync && key.admission == sync_->id.admission &&
      key.sequence == sync_->id.sequence)
    return on_sync_outcome(outcome, error);
  if (optimizing_ && key == optimizing_->key()) return on_optimize_outcome(error);
  if (call != nullptr) {
    call->answer = outcome.answer;
    return end_call(*call, std::move(error), record());
  }
  if (outcome.code != Code::ok) calls_.hear(key, {std::move(error), record()});
}

void Engine::abort(const CallPtr& call, Code code, Instant now) {
  now_ = now;
  if (out_ || call->done || call->gave_up) return;
  calls_.give_up(call, now + kAbortGrace, code);
  report_entered(now, true);
  request_abort(call->key, code);
}

// ---- threads
// ------------------------------------------------------------------------------------------------------

bool Engine::in_memory_alone(const wire::CallKey& key) const {
  const CallEntry* const entry = calls_.find(key);
  return entry != nullptr && entry->phase == CallPhase::in_memory && !entry->told_attempt;
}

void Engine::report_blocked(Instant now) {
  const auto proceeds = [&](const CallPtr& call) {
    // A peer that receives state, or checks whether it can take it, does not wait for a call of the
    // others: links are watched for that.
    if (sync_ && call == sync_->call && (transfer_.receiving() || sync_->unanswered)) return true;
    if (measuring() && call == optimizing_->call) return true;
    // The others of this host may have committed it while this process slept, and the master not
    // know: until it is told that this operation is awaited, it may be over.
    return in_memory_alone(call->key);
  };
  wire::Blocked blocked = threads_.look(proceeds, now);
  // Connection by connection: one that ended takes its count with it.
  std::uint64_t moved = locality_.group().moved() - moved_at_blocked_;
  moved_at_blocked_ += moved;
  moved += links_.moved_since_last();
  const bool told = threads_.told();
  threads_.told(!blocked.waits.empty());
  if (blocked.waits.empty()) {
    if (told) session_.blocked({});
    return;
  }
  // Heartbeats alone are not movement: a few frames an interval and stripe.
  blocked.moving = moved > links_.stripe_count() * 16 * link::kFrameHeaderBytes;
  session_.blocked(blocked);
}

// ---- time
// ---------------------------------------------------------------------------------------------------------

void Engine::on_time(Instant now) {
  now_ = now;
  if (out_) return;
  const Settings& settings = options_.settings;
  if (now - last_tick_ > settings.heartbeat_timeout / 2) {
    // We were frozen, not the others: what they sent meanwhile is still to be read.
    master_link_.on_heard(now);
    links_.excuse_silence(now);
  }
  last_tick_ = now;
  report_entered(now, false);
  for (const CallPtr& call : calls_.gave_up()) {
    const auto [until, code] = *call->gave_up;
    if (now < until) continue;
    const std::string what = wire::describe(call->key);
    session_.leave("gave up on " + what);
    die({code == Code::interrupted ? code : Code::timeout,
         "no verdict on " + what + " within a second after giving up; this peer has left the run",
         {},
         {}});
    return;
  }
  switch (master_link_.on_time(now)) {
    case MasterLink::Due::nothing:
      break;
    case MasterLink::Due::dial:
      actions_.dial_control = true;
      break;
    case MasterLink::Due::silent:
      actions_.close_control = true;
      on_control_lost("nothing heard from the master", now);
      break;
    case MasterLink::Due::lost:
      return die({Code::master_lost,
                  "the master could not be reached again: " + master_link_.failure(),
                  {},
                  {}});
  }
  links_.on_time(link_context());
  links_told();
  dial_pipes();
  locality_.on_time(now);
  locality_told();
  if (prober_.on_time(now) && record() != nullptr) {
    for (const wire::Member& member : record()->members)
      if (prober_.probes(member.id)) links_.wake(member.id);
  }
  if (measuring() && prober_.over(now)) tell_measurements();
  if (now < next_tick_) return;
  next_tick_ = now + settings.heartbeat_interval / 4;
  watch_rates();
  links_.on_tick(link_context());
  links_told();
  if (now >= next_heartbeat_) {
    next_heartbeat_ = now + settings.heartbeat_interval;
    session_.heartbeat();
    links_.on_watch(link_context());
    links_told();
    // Whoever has lost the master knows of no election; so long it may take.
    transfer_.on_time(now, settings.reconnect_timeout + settings.heartbeat_timeout);
    transfer_told();
  }
  if (now >= next_blocked_) {
    next_blocked_ = now + Threads::kBlockedAfter / 2;
    report_blocked(now);
  }
}

Instant Engine::next_deadline() const {
  if (out_) return now_ + std::chrono::seconds(1);
  Instant next = next_tick_;
  if (measuring()) next = std::min(next, prober_.next_deadline());
  next = std::min({next, calls_.next_due(), calls_.next_give_up()});
  if (const auto local = locality_.next_deadline()) next = std::min(next, *local);
  next = std::min(next, master_link_.next_deadline());
  return std::min(next, links_.next_deadline(link_context()));
}

EngineActions Engine::take_actions() {
  if (calls_.has_reports()) session_.report(calls_.take_reports());
  if (threads_.take_correction() && !out_) session_.blocked({});
  EngineActions actions = std::exchange(actions_, {});
  actions.local = locality_.take_actions();
  actions.control = session_.take_output();
  link::LinkActions links = links_.take_actions();
  actions.dials = std::move(links.dials);
  actions.flush = std::move(links.flush);
  actions.close = std::move(links.close);
  return actions;
}

}  // namespace pccl::peer
