#include "pccl/peer/engine.h"

#include <algorithm>
#include <utility>

#include "pccl/base/overloaded.h"

namespace pccl::peer {
namespace {

// For a decision on a call that its caller has given up. Then this peer leaves the run.
constexpr Duration kDecisionGrace = std::chrono::seconds(1);

constexpr Duration kLongestTick = std::chrono::milliseconds(500);

constexpr const char* kNotMember = "not a member of the run";

}  // namespace

Engine::Engine(const EngineOptions& options, std::shared_ptr<BufferPool> pool)
    : options_(options),
      tracer_(options.trace),
      session_(options.join),
      control_(options.settings, options.join.masters, options.join.id),
      calls_(session_, actions_, tracer_, now_),
      admission_(session_, options_.join),
      link_driver_(links_, {session_, admission_, locality_, operations_, sync_, measuring_,
                            actions_, tracer_, now_}),
      links_({options.join.id, options.settings, options.stripes, options.stripe_budget,
              options.local_stripes, options.encrypted},
             link_driver_),
      locality_(options.locality, options.join.id),
      operations_({.buffer_bytes = options.settings.buffer_bytes,
                   .eager_bytes = options.eager_bytes,
                   .eager_room = options.eager_room},
                  calls_, session_, admission_, locality_, pool, links_,
                  options.parallel == nullptr ? serial_ : *options.parallel),
      sync_(calls_, admission_, options.join.id, std::move(pool), links_, locality_),
      measuring_({options.probe_bytes, options.settings.heartbeat_interval}, calls_, session_,
                 links_, locality_) {}

Standing Engine::standing() const {
  if (out()) return Standing::out;
  if (session_.member()) return Standing::member;
  const bool joined = control_.was_reached() && !admission_.waits();
  return joined ? Standing::newcomer : Standing::joining;
}

// -- the control connection

void Engine::start(Instant now) {
  at(now);
  last_time_ = now;
  next_tick_ = now;
  control_.start(now);
  on_time(now);
}

void Engine::on_control_open(Instant now) {
  at(now);
  if (out()) return;
  strangers_ = 0;
  control_.on_open(now);
  session_.on_open(control_.at(), control_.may_found());
}

void Engine::on_control_bytes(std::span<const std::uint8_t> bytes, Instant now) {
  at(now);
  if (out() || !control_.is_open()) return;
  control_.on_heard(now);
  session_.on_bytes(bytes);
  for (;;) {
    const Session::Next event = session_.next();
    if (!event) {
      const std::string& why = event.error().reason;
      if (!control_.was_reached() && event.error().code == Code::invalid_argument)
        return die(event.error());
      if (!control_.was_reached()) return die({Code::refused, "this is no pccl master: " + why});
      actions_.close_control = true;
      return on_control_lost(why, now);
    }
    if (!*event) return;
    hear(**event);
    if (out()) return;
  }
}

void Engine::hear(const SessionEvent& event) {
  std::visit(Overloaded{
                 [&](const Welcomed& welcomed) { on_welcome(welcomed); },
                 [&](const NewEpoch& epoch) { on_epoch(epoch.record); },
                 [&](const wire::Verdict& verdict) {
                   const Status status = operations_.on_verdict(verdict);
                   if (!status) die(status.error());
                 },
                 [&](const wire::Outcome& outcome) { on_outcome(outcome); },
                 [&](const wire::Prepare& prepare) {
                   if (admission_.on_prepare(prepare)) link_driver_.on_prepare();
                 },
                 [&](const wire::Expect& expect) {
                   admission_.expect(expect.newcomers);
                   locality_.admission_due(expect.ready);
                   link_driver_.choose();
                 },
                 [&](const wire::Notice& notice) { actions_.note(LogLevel::warn, notice.text); },
                 [&](const wire::Try& question) { link_driver_.on_try(question); },
                 [&](const wire::Relay& relay) { link_driver_.on_relay(relay); },
                 [&](const wire::NotServing& answer) {
                   control_.on_not_serving(answer.recovers, now_);
                   leave_master();
                 },
                 [&](const LeftBehind& left) {
                   actions_.note(LogLevel::debug,
                                 "a master says \"" + left.error.reason + "\"; asking the others");
                   control_.on_refused(left.error, now_);
                   leave_master();
                 },
                 [&](const wire::Drain&) {
                   if (draining_) return;
                   actions_.note(
                       LogLevel::warn,
                       "the operator asks this peer to leave at its next admission point");
                   drain(now_);
                 },
                 [&](const Dismissed& dismissed) {
                   actions_.note(LogLevel::debug,
                                 "the master ended our part in the run: " + dismissed.error.reason);
                   die(dismissed.error);
                 },
             },
             event);
}

void Engine::on_control_lost(const std::string& reason, Instant now) {
  at(now);
  if (out()) return;
  const bool broke = control_.on_lost(reason, session_.welcomed(), now);
  session_.on_lost();
  if (!broke) return;
  threads_.reported(false);
  actions_.note(LogLevel::info,
                "the connection to the master broke (" + reason + "); dialling again");
}

void Engine::on_stranger_at_master(const std::string& reason, Instant now) {
  at(now);
  // The other masters may have the right secret.
  if (control_.was_reached() || out() || ++strangers_ < options_.join.masters)
    return on_control_lost(reason, now);
  die({Code::authentication_failed, reason});
}

void Engine::on_welcome(const Welcomed& welcomed) {
  control_.on_welcome(!welcomed.welcome.group_started, now_);
  admission_.on_welcome(welcomed.welcome);
  if (welcomed.again) session_.say_again(calls().open_messages());
  if (!session_.member()) return;
  if (welcomed.again) actions_.note(LogLevel::info, "back at the master");
  // The master may lack the reports of links, or be a new one.
  for (const link::LinkStateReport& report : links_.report_all(link_driver_.context()))
    session_.report_link(report.peer, report.state, report.reason);
}

// Closes the control connection: another master is dialled.
void Engine::leave_master() {
  session_.on_lost();
  actions_.close_control = true;
}

void Engine::withdraw_admission(Instant now) {
  at(now);
  if (!out() && admission_.withdraw()) link_driver_.choose();
}

void Engine::leave(const std::string& reason, Instant now) {
  at(now);
  if (out()) return;
  session_.leave(reason);
  die({Code::invalid_usage, "the communicator is closed"});
}

void Engine::fail(const std::string& what) {
  if (out()) return;
  session_.leave("it failed: " + what);
  die({Code::internal_error, "the engine failed: " + what});
}

// Takes this peer out of the run: ends every call with `error` and closes every connection.
void Engine::die(Error error) {
  if (out()) return;
  // Operations committed in memory end as committed here too. All other calls fail.
  try {
    (void)locality_.close_group();
    link_driver_.handle_locality();
  } catch (const std::exception& failure) {
    error.reason += std::string("; ") + failure.what();
  }
  end_ = std::move(error);
  end_all(*end_, session_.record());
  const std::vector<CallPtr> calls = calls_.table().calls();
  calls_.table().clear();
  for (const CallPtr& call : calls) calls_.end(*call, *end_, session_.record());
  link_driver_.close();
  control_.close();
  session_.stop();
  actions_.close_control = true;
  actions_.calls_ended = true;
}

// Stops all operations, and ends the sync and the measurement. No array is used when this returns.
// Other calls of the table are not ended.
void Engine::end_all(const Error& error, const Record& record) {
  operations_.stop_all();
  if (sync_.active()) sync_.end(error, record);
  if (measuring_.active()) measuring_.end(error, record);
}

void Engine::tell_news() {
  for (std::string& line : news_.take()) {
    if (!options_.join.quiet) actions_.note(LogLevel::warn, std::move(line));
  }
}

// -- epochs

void Engine::on_epoch(const Record& record) {
  // First of all: operations committed in memory stay committed, whatever this epoch aborts.
  const bool whole = locality_.close_group();
  link_driver_.handle_locality();
  if (!whole) {
    return die({Code::internal_error,
                "the result of an operation in shared memory was lost with its owner"});
  }
  control_.on_member();
  census_ = record->census;
  news_.note(*record);
  if (tracer_.on()) tracer_.epoch(record, session_.run(), now_);
  if (!calls().calls().empty()) tell_news();
  if (record->cause == wire::Cause::admission) {
    begin_admission(record);
  } else {
    operations_.end_attempts(record);
  }
  sync_.transfer().set_members(record->members);
  link_driver_.handle_sync();
  measuring_.begin_epoch(record, now_);
  locality_.begin_epoch(session_.run(), record);
  link_driver_.handle_locality();
  operations_.begin_epoch(record);
  link_driver_.begin_epoch();
  link_driver_.choose();
  actions_.resume = links_.held_stripes();
  operations_.run_all(now_);
  actions_.calls_ended = true;  // a thread may wait for admission
}

// All members have entered the admit round: numbers of calls restart at 0. A call of another thread
// that is under way has lost its number, and fails.
void Engine::begin_admission(const Record& record) {
  admission_.begin(record);
  const Error late{
      Code::invalid_usage, "newcomers were let in while this call was under way", {}, {}};
  end_all(late, record);
  const std::vector<CallPtr> calls = calls_.table().calls();
  calls_.table().begin_admission(record->admission);
  for (const CallPtr& call : calls) {
    const auto* round = std::get_if<wire::RoundKey>(&call->key);
    const bool admitting = round != nullptr && (round->kind == wire::RoundKind::admit ||
                                                round->kind == wire::RoundKind::sync_admit);
    calls_.end(*call, admitting ? Error{Code::ok, {}} : late, record);
  }
  sync_.transfer().forget_before(record->admission);
}

void Engine::on_outcome(const wire::Outcome& outcome) {
  census_ = outcome.census;
  const wire::RoundKey& key = outcome.key;
  Error error{outcome.code, outcome.reason, outcome.culprit, outcome.waiting};
  CallTable& table = calls_.table();
  const CallEntry* const entry = table.find(key);
  const CallPtr call = entry == nullptr ? nullptr : entry->call;
  if (call != nullptr) table.end(key);
  if (sync_.owns(key)) {
    sync_.on_outcome(outcome, error);
    return link_driver_.handle_sync();
  }
  if (measuring_.owns(key)) {
    measuring_.on_outcome(error, link_driver_.context());
    return link_driver_.handle_measuring();
  }
  if (call != nullptr) {
    call->answer = outcome.answer;
    return calls_.end(*call, std::move(error), session_.record());
  }
  if (outcome.code != Code::ok) table.hear(key, {std::move(error), session_.record()});
}

// -- calls

// Makes a call for the user. It is done already if it cannot begin.
CallPtr Engine::begin_call(Instant now) {
  at(now);
  auto call = std::make_shared<Call>();
  if (out()) {
    calls_.end(*call, *end_, nullptr);
  } else if (!session_.member()) {
    calls_.refuse(*call, Code::invalid_usage, kNotMember);
  } else {
    admission_.use_fresh();
    tell_news();
  }
  return call;
}

CallPtr Engine::enter(wire::RoundKind kind, Instant now, wire::RoundPayload payload) {
  CallPtr call = begin_call(now);
  if (!call->done) calls_.enter_next(call, kind, std::move(payload));
  return call;
}

CallPtr Engine::start_operation(OperationRequest request, Instant now) {
  CallPtr call = begin_call(now);
  measuring_.primer().end();
  if (!call->done) operations_.start(call, std::move(request), now);
  return call;
}

CallPtr Engine::start_sync(SyncRequest request, Instant now) {
  CallPtr call = begin_call(now);
  if (call->done) return call;
  if (sync_.active()) {
    calls_.refuse(*call, Code::invalid_usage, "another thread is in a sync of this communicator");
    return call;
  }
  sync_.start(call, std::move(request));
  link_driver_.handle_sync();
  return call;
}

void Engine::answer(const CallPtr& call, const Error& error, Instant now) {
  at(now);
  if (out()) return;
  sync_.answer(call, error);
  link_driver_.handle_sync();
}

CallPtr Engine::start_optimize(Instant now) {
  CallPtr call = begin_call(now);
  if (call->done) return call;
  if (measuring_.active()) {
    calls_.refuse(*call, Code::invalid_usage,
                  "another thread is in an optimize_topology of this communicator");
    return call;
  }
  measuring_.start(call);
  link_driver_.handle_measuring();
  return call;
}

void Engine::expect_operation(Instant at, const measured::Announcement& announced, Instant now) {
  this->at(now);
  if (out() || !session_.member()) return;
  measuring_.expect_operation(at, announced);
  measuring_.on_time(link_driver_.context());
  link_driver_.handle_measuring();
}

// Like `enter`, but ends the round, so that no member has to enter it.
CallPtr Engine::decline_round(wire::RoundKind kind, Code code, Instant now) {
  if (out() || !session_.member() || (sync_.active() && kind == wire::RoundKind::sync)) {
    at(now);
    auto call = std::make_shared<Call>();
    calls_.refuse(*call, code, "given up", session_.record());
    return call;
  }
  CallPtr call = begin_call(now);
  CallTable& table = calls_.table();
  const wire::RoundKey key = table.next_round(kind);
  // All rounds of the call that is given up count as called.
  if (kind == wire::RoundKind::optimize) table.skip_rounds(kind, key.sequence + Measuring::kRounds);
  if (kind == wire::RoundKind::sync) {
    admission_.pay_sync();
    table.skip_rounds(wire::RoundKind::sync_detail, key.sequence + 1);
    table.skip_rounds(wire::RoundKind::sync_end, key.sequence + 1);
  }
  call->key = key;
  if (const auto early = table.take_early(key)) {
    calls_.end(*call, early->error, early->record);
    return call;
  }
  (void)table.open(key, call);
  give_up(call, code, now);
  return call;
}

void Engine::give_up(const CallPtr& call, Code code, Instant now) {
  at(now);
  if (out() || call->done || call->gave_up) return;
  calls_.table().give_up(call, now + kDecisionGrace, code);
  operations_.report_entered(now, true);
  calls_.request_abort(call->key, code);
}

// -- work

void Engine::combine() {
  operations_.executor().combine();
  operations_.handle_executor(now_);
  if (!sync_.transfer().has_work()) return;
  sync_.transfer().read();
  link_driver_.handle_sync();
}

Pace Engine::step(Instant now) {
  if (out()) return Pace::idle;
  at(now);
  const Pace pace = locality_.step(now);
  link_driver_.handle_locality();
  if (locality_.group().broken()) {
    die({Code::internal_error, "a member wrote nonsense to the memory it shares"});
    return Pace::idle;
  }
  if (pace != Pace::idle) return pace;
  return locality_.group().fall_asleep(now) ? Pace::idle : Pace::working;
}

// -- time

void Engine::on_time(Instant now) {
  at(now);
  if (out()) return;
  if (now - last_time_ > options_.settings.heartbeat_timeout / 2) {
    // This process was frozen, not the others: their bytes from that time are still unread.
    control_.on_heard(now);
    links_.excuse_silence(now);
  }
  last_time_ = now;
  operations_.report_entered(now, false);
  if (!check_given_up() || !check_control()) return;
  links_.on_time(link_driver_.context());
  link_driver_.handle_links();
  link_driver_.dial_pipes();
  locality_.on_time(now);
  link_driver_.handle_locality();
  measuring_.on_time(link_driver_.context());
  link_driver_.handle_measuring();
  if (now >= next_tick_) on_tick();
}

// False: this peer has left the run, since no verdict arrived on a call that was given up.
bool Engine::check_given_up() {
  for (const CallPtr& call : calls_.table().gave_up()) {
    const auto [until, code] = *call->gave_up;
    if (now_ < until) continue;
    const std::string what = wire::describe(call->key);
    session_.leave("gave up on " + what);
    die({code == Code::interrupted ? code : Code::timeout,
         "no verdict on " + what + " within a second after giving up; this peer has left the run",
         {},
         {}});
    return false;
  }
  return true;
}

// False: the master is lost, and this peer is out.
bool Engine::check_control() {
  switch (control_.on_time(now_, session_.member())) {
    case ControlConnection::Due::nothing:
      return true;
    case ControlConnection::Due::dial:
      actions_.dial_control = true;
      actions_.master = control_.at();
      return true;
    case ControlConnection::Due::silent:
      actions_.close_control = true;
      on_control_lost("nothing heard from the master", now_);
      return true;
    case ControlConnection::Due::elsewhere:
      actions_.note(LogLevel::debug, "no run has begun here yet; asking the other masters again");
      control_.look_elsewhere(now_);
      leave_master();
      return true;
    case ControlConnection::Due::lost:
      break;
  }
  if (control_.refusal()) {
    die(*control_.refusal());
    return false;
  }
  die({Code::master_lost, "the master could not be reached again: " + control_.failure()});
  return false;
}

void Engine::drain(Instant now) {
  at(now);
  // Also of a peer that is out: its program may join again, and has to know.
  if (std::exchange(draining_, true) || out()) return;
  if (session_.welcomed()) say_heartbeat();  // otherwise a later one says it
}

void Engine::wait_no_longer_than(const wire::Patience& patience, Instant now) {
  at(now);
  if (out() || std::exchange(patience_, patience) == patience) return;
  if (session_.welcomed()) say_heartbeat();
}

void Engine::say_heartbeat() {
  const Totals& totals = calls_.totals();
  session_.say(wire::Heartbeat{
      {totals.operations, totals.reduced_bytes, totals.sent_bytes, totals.received_bytes},
      draining_,
      patience_});
}

// A few times in each heartbeat interval, and at least each kLongestTick.
void Engine::on_tick() {
  const Settings& settings = options_.settings;
  next_tick_ = now_ + std::min<Duration>(settings.heartbeat_interval / 4, kLongestTick);
  measuring_.watch(operations_.running(), now_);
  links_.on_tick(link_driver_.context());
  link_driver_.handle_links();
  if (now_ >= next_heartbeat_) {
    next_heartbeat_ = now_ + settings.heartbeat_interval;
    say_heartbeat();
    links_.on_watch(link_driver_.context());
    link_driver_.handle_links();
    // A holder that has lost the master does not know the election. It has this time to return.
    sync_.transfer().on_time(now_, settings.reconnect_timeout + settings.heartbeat_timeout);
    link_driver_.handle_sync();
  }
  if (now_ >= next_blocked_) {
    next_blocked_ = now_ + Threads::kBlockedAfter / 2;
    report_blocked();
  }
}

void Engine::report_blocked() {
  const auto proceeds = [&](const CallPtr& call) {
    // A peer that receives or checks state, or measures, does not wait for a call of another
    // member. Links are watched for these cases.
    if (sync_.proceeds(call) || measuring_.proceeds(call)) return true;
    // Neighbours may have committed the operation while this process slept, without the master.
    // Until this attempt is reported to the master, the operation may be over.
    return operations_.in_memory_alone(call->key);
  };
  wire::Blocked blocked = threads_.look(proceeds, now_);
  // Counted per connection, since the count of a connection ends with it.
  std::uint64_t moved = locality_.group().moved() - moved_at_blocked_;
  moved_at_blocked_ += moved;
  moved += links_.moved_since_last();
  const bool reported = threads_.reported();
  threads_.reported(!blocked.waits.empty());
  if (blocked.waits.empty()) {
    if (reported) session_.say(wire::Blocked{});
    return;
  }
  // Heartbeats do not count as movement. They are a few frames per interval and stripe.
  blocked.moving = moved > links_.stripe_count() * 16 * link::kFrameHeaderBytes;
  session_.say(blocked);
}

Instant Engine::next_deadline() const {
  if (out()) return now_ + std::chrono::seconds(1);
  Instant next = std::min(next_tick_, measuring_.next_deadline());
  next = std::min({next, calls().next_due(), calls().next_give_up()});
  if (const auto local = locality_.next_deadline()) next = std::min(next, *local);
  next = std::min(next, control_.next_deadline());
  return std::min(next, links_.next_deadline(link_driver_.context()));
}

bool Engine::has_actions() const {
  return !actions_.empty() || calls().has_reports() || session_.has_output() ||
         locality_.has_actions() || links_.has_actions() || tracer_.has_events() ||
         (!out() && (operations_.executor().has_work() || sync_.transfer().has_work() ||
                     threads_.has_correction()));
}

EngineActions Engine::take_actions() {
  if (!out()) combine();
  if (calls().has_reports()) session_.report(calls_.table().take_reports());
  if (threads_.take_correction() && !out()) session_.say(wire::Blocked{});
  EngineActions actions = std::exchange(actions_, {});
  actions.trace = tracer_.take();
  actions.local = locality_.take_actions();
  actions.control = session_.take_output();
  link::LinkActions links = links_.take_actions();
  actions.dials = std::move(links.dials);
  actions.flush = std::move(links.flush);
  actions.close.insert(actions.close.end(), links.close.begin(), links.close.end());
  return actions;
}

}  // namespace pccl::peer
