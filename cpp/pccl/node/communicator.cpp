#include "pccl/node/communicator.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/base/floats.h"
#include "pccl/base/fork.h"
#include "pccl/base/log.h"
#include "pccl/base/name.h"
#include "pccl/base/text.h"
#include "pccl/base/version.h"
#include "pccl/io/address.h"
#include "pccl/io/workers.h"
#include "pccl/node/mixed_states.h"
#include "pccl/node/visit.h"

namespace pccl::node {
namespace {

// More than any measurement takes (see prober.h). A peer with less time left votes against one.
constexpr Duration kMeasuringTakes = std::chrono::seconds(6);
constexpr Duration kLeaveGrace = std::chrono::seconds(1);
// For another master to take over and to hear that this member leaves, which counts as its vote.
constexpr Duration kTakeoverGrace = std::chrono::seconds(2);
constexpr Duration kRemind = std::chrono::seconds(1);  // then a peer logs what it waits for
constexpr const char* kWaitingForAdmission =
    "waiting to be let in by the members, at their next pccl.admit() or pccl.sync()";
// Threads that hash a state, and that write what has come: at most, and bytes worth one more.
constexpr unsigned kMaxStateThreads = 8;
constexpr std::uint64_t kStateShare = 16 << 20;

std::string listed(const std::vector<wire::Address>& addresses) {
  std::string all;
  for (const wire::Address& address : addresses)
    all += (all.empty() ? "" : ", ") + wire::to_string(address);
  return all;
}

// Why no master has let this peer in.
std::string no_master(const std::vector<wire::Address>& masters, const Runtime& runtime,
                      const peer::ControlConnection& link) {
  if (masters.size() == 1)
    return "no master at " + failure_at(listed(masters), runtime.dial_failure());
  std::string text = "no master at " + listed(masters) + " lets this peer in: ";
  if (const auto unanswered = link.unanswered())
    text += wire::to_string(masters.at(*unanswered)) + ": ";
  return text + link.failure();
}

unsigned state_threads(const std::vector<state::LocalEntry>& entries) {
  std::uint64_t bytes = 0;
  for (const state::LocalEntry& entry : entries) bytes += entry.what.bytes;
  const unsigned cores = std::clamp(std::thread::hardware_concurrency(), 1U, kMaxStateThreads);
  return static_cast<unsigned>(std::clamp<std::uint64_t>(bytes / kStateShare, 1, cores));
}

Error closed_error() { return {Code::invalid_usage, "this communicator is closed"}; }

Status check_finished(const peer::Engine& engine) {
  const std::size_t count = engine.calls().unfinished();
  if (count == 0) return {};
  return Status(Code::pending_operations,
                plural(count, "operation") + " of this communicator not finished yet");
}

}  // namespace

Communicator::Communicator(CommunicatorOptions options)
    : options_(std::move(options)), generation_(fork_generation()) {
  if (options_.name.empty()) options_.name = options_.settings.name;
  if (options_.name.empty()) options_.name = default_name();
}

Communicator::~Communicator() {
  if (inert()) {
    // Never destroyed, since its threads do not exist in this process.
    new std::shared_ptr<Runtime>(std::move(runtime_));
    return;
  }
  close();
}

bool Communicator::inert() const { return fork_generation() != generation_; }

Result<std::shared_ptr<Runtime>> Communicator::runtime() {
  if (inert()) {
    return {Code::invalid_usage,
            "this process was forked; its copy of the communicator cannot be used"};
  }
  if (closed_) return closed_error();
  const std::lock_guard lock(mutex_);
  if (runtime_ == nullptr) return {Code::invalid_usage, "not joined yet"};
  return runtime_;
}

// The call that ends now was decided among the members of `record`.
void Communicator::look(peer::Engine& engine, const peer::Record& record) {
  const std::lock_guard lock(mutex_);
  see(record);
  view_.census = engine.census();
}

void Communicator::see(const peer::Record& record) {
  if (record == nullptr || (view_.record != nullptr && record->epoch <= view_.record->epoch))
    return;
  view_.record = record;
  view_.census = record->census;
}

// ---- the order of calls

// Calls without a tag (explicit API: with tag 0) are matched by their order, so one thread makes
// them: with several threads, nothing tells the order that the program means. When that thread has
// ended, another one may take its place.
Status Communicator::claim_order(const peer::OperationRequest& request) {
  const bool explicit_api = request.alone_is_error;
  if (request.any_thread || (request.tag && !(explicit_api && *request.tag == 0))) return {};
  const std::uint64_t thread = *this_thread();
  std::unique_lock lock(mutex_);
  if (owner_.thread == thread) return {};
  lock.unlock();
  const std::uint64_t caller = options_.thread ? options_.thread() : 0;
  lock.lock();
  while (!owner_.life.expired()) {
    const Owner owner = owner_;
    lock.unlock();
    const bool ended = options_.ended && options_.ended(owner.caller);
    lock.lock();
    if (owner_.thread != owner.thread) continue;  // another thread has claimed it meanwhile
    // The owner may have ended since the check above, and a new thread may have its number.
    if (ended || owner.life.expired()) break;
    const std::string reason =
        explicit_api
            ? "another thread makes the reductions with tag 0, the default, and these meet by "
              "the order of one thread's calls; pass other tags here, or call from that thread"
            : "another thread makes the calls without a tag, and these meet by the order of "
              "one thread's calls; pass tag= here, or call from that thread";
    return Status(Code::invalid_usage, reason);
  }
  owner_ = {thread, this_thread(), caller};
  return {};
}

// ---- waiting

Status Communicator::await_call(Visit& visit, const peer::CallPtr& call, const Until& until,
                                bool give_up, const std::function<void()>& reply) {
  peer::Engine& engine = visit.engine();
  const auto done = [&] { return call->done.load(std::memory_order_acquire); };
  const auto due = [&] { return done() || (reply && call->asks.load(std::memory_order_acquire)); };
  Code gave_up = Code::ok;
  if (!done()) {
    engine.threads().waits(visit.thread(), call, clock_now());
    while (!done() && gave_up == Code::ok) {
      if (visit.drive(due, until.deadline)) {
        if (!done()) reply();
      } else if (visit.interrupted(until.limit)) {
        gave_up = Code::interrupted;
      } else if (!done() && until.passed()) {
        gave_up = Code::timeout;
      }
    }
    if (give_up && gave_up != Code::ok && !done()) {
      engine.give_up(call, gave_up, clock_now());
      visit.runtime().act();
      while (!visit.drive(done)) {  // the engine leaves the run if no decision comes
      }
    }
    engine.threads().continues(visit.thread());
  }
  if (done()) look(engine, call->record);
  if (gave_up == Code::interrupted) return Status(Code::interrupted, "interrupted");
  if (!done()) return Status(Code::timeout, "the deadline passed while operations were unfinished");
  if (call->error.code != Code::ok) return call->error;
  return {};
}

// For a call that this peer has given up.
void Communicator::await_end(Visit& visit, const peer::CallPtr& call) {
  const Limit none;
  (void)await_call(visit, call, Until(none), true);
}

// Ends the next round of that kind for all, or leaves the run.
void Communicator::decline_round(Visit& visit, wire::RoundKind kind, Code code) {
  const peer::CallPtr call = visit.engine().decline_round(kind, code, clock_now());
  visit.runtime().act();
  await_end(visit, call);
}

// Calls `remind` about every 100 ms.
Status Communicator::await_standing(Visit& visit, const std::function<bool()>& done,
                                    const std::function<void()>& remind) {
  while (!visit.drive(done, visit.until().deadline)) {
    if (visit.interrupted(visit.until().limit)) return Status(Code::interrupted, "interrupted");
    if (done()) return {};
    if (visit.until().passed()) return Status(Code::timeout, "the deadline passed");
    remind();
  }
  return {};
}

// Lets a newcomer wait for its admission, in its first collective call.
Status Communicator::become_member(Visit& visit) {
  Runtime& runtime = visit.runtime();
  peer::Engine& engine = visit.engine();
  const auto decided = [&] {
    const peer::Standing standing = runtime.standing();
    return standing == peer::Standing::member || standing == peer::Standing::out;
  };
  if (engine.standing() != peer::Standing::out && engine.standing() != peer::Standing::member) {
    engine.admission().request();
    runtime.act();
    const Instant remind = clock_now() + kRemind;
    bool reminded = false;
    const Status status = await_standing(visit, decided, [&] {
      if (reminded || clock_now() < remind) return;
      reminded = true;
      log(LogLevel::warn, options_.name, kWaitingForAdmission);
    });
    if (!status) {
      engine.withdraw_admission(clock_now());
      runtime.act();
      if (status.error().code != Code::timeout) return status;
      return Status(Code::timeout, "the members did not let this peer in within the timeout");
    }
    if (engine.standing() == peer::Standing::member && reminded)
      log(LogLevel::warn, options_.name,
          "let in: " + plural(engine.session().record()->members.size(), "member"),
          runtime.epoch());
  }
  if (engine.standing() == peer::Standing::out) return engine.end();
  const std::lock_guard lock(mutex_);
  if (view_.record == nullptr) {
    see(engine.admission().admitted());
    view_.census = engine.census();
  }
  return {};
}

template <class Body>
auto Communicator::as_member(const Limit& limit, const Body& body)
    -> decltype(body(std::declval<Visit&>())) {
  const auto found = runtime();
  if (!found) return found.error();
  const Until until(limit);
  Visit visit(*found, until);
  if (const Status status = become_member(visit); !status) return status.error();
  return body(visit);
}

// Whether there is nobody to wait for in a round.
bool Communicator::alone(Visit& visit) {
  if (visit.engine().session().record()->members.size() > 1) return false;
  look(visit.engine(), visit.engine().session().record());
  return true;
}

Result<peer::CallPtr> Communicator::round(Visit& visit, wire::RoundKind kind) {
  const peer::CallPtr call = visit.engine().enter(kind, clock_now());
  visit.runtime().act();
  if (const Status status = await_call(visit, call, visit.until(), true); !status)
    return status.error();
  return call;
}

Status Communicator::optimize_now(Visit& visit) {
  const peer::CallPtr call = visit.engine().start_optimize(clock_now());
  visit.runtime().act();
  return await_call(visit, call, visit.until(), true);
}

// The simple API's admission point, with a measurement if the members agree on one. `gave_up` is
// called when the round was decided, but this peer does not take part in what follows.
Result<peer::CallPtr> Communicator::admission_point(Visit& visit, wire::RoundKind kind,
                                                    const std::function<void(Code)>& gave_up) {
  peer::Engine& engine = visit.engine();
  // Replicas count the points that they have passed: a point that fails later cannot be repeated.
  const bool repeatable =
      kind == wire::RoundKind::sync_admit || engine.session().record()->ranks_per_replica == 0;
  const auto& deadline = visit.until().deadline;
  const bool has_time = !deadline || *deadline - clock_now() > kMeasuringTakes;
  const bool measures = repeatable && has_time && !engine.measuring().active();
  const peer::CallPtr call = engine.enter(kind, clock_now(), wire::AdmissionPoint{measures});
  visit.runtime().act();
  Status status = await_call(visit, call, visit.until(), true);
  const bool decided = call->done && call->error.code == Code::ok;
  if (decided && call->answer != 0) {
    if (status) {
      // A failed measurement changes nothing, unless this peer must stop. And if a member was lost,
      // all members are at this point again, or in a sync that fails for all.
      const Status measured = optimize_now(visit);
      const bool again =
          kind == wire::RoundKind::admit && !measured && measured.error().code == Code::peer_lost;
      const bool stops = !measured && (measured.error().code == Code::interrupted ||
                                       engine.standing() == peer::Standing::out);
      if (stops || again) status = measured;
    } else {
      decline_round(visit, wire::RoundKind::optimize, status.error().code);
    }
  }
  if (status) return call;
  if (decided && gave_up) gave_up(status.error().code);
  return status.error();
}

// Waits for the operations that this peer has started; their own waiters get their errors. A
// deadline or Ctrl-C ends the remaining ones for all members.
Status Communicator::finish_own(Visit& visit) {
  const std::vector<peer::CallPtr> own = visit.engine().calls().operation_calls();
  Status stopped;
  for (const peer::CallPtr& call : own) {
    const Status status = await_call(visit, call, visit.until(), false);
    const bool interrupted = !status && status.error().code == Code::interrupted;
    if (call->done && !interrupted) continue;
    stopped = status;
    break;
  }
  if (stopped) return {};
  for (const peer::CallPtr& call : own)
    visit.engine().give_up(call, stopped.error().code, clock_now());
  visit.runtime().act();
  for (const peer::CallPtr& call : own) await_end(visit, call);
  return stopped;
}

// ---- joining and leaving

Status Communicator::join(const JoinRequest& request, const Limit& limit) {
  if (inert() || closed_) return runtime().error();
  const Until until(limit);
  RuntimeOptions options{options_, {}};
  options.join.id = id_;
  options.join.group = options_.group;
  options.join.min_peers = request.min_peers;
  options.join.waiting = true;
  options.join.start_only = !request.enter;
  options.join.order = options_.settings.local_rank;
  options.join.replica = options_.replica;
  options.join.ranks_per_replica = options_.ranks_per_replica;
  options.join.name = options_.name;
  options.join.quiet = options_.quiet;
  options.join.software = kSoftware;
  std::shared_ptr<Runtime> runtime;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return closed_error();
    if (runtime_ != nullptr)
      return Status(Code::invalid_usage, "this communicator has joined already");
    auto opened = Runtime::open(std::move(options));
    if (!opened) return opened.error();
    runtime = runtime_ = *opened;
  }
  Visit visit(runtime, until);
  peer::Engine& engine = visit.engine();
  const Instant remind = clock_now() + kRemind;
  std::string logged;
  const auto answered = [&] {
    return runtime->standing() != peer::Standing::joining ||
           runtime->join_failures() >= request.attempts;
  };
  // A newcomer may wait for a master that does not answer although the first one does.
  const auto unreached = [&] {
    return runtime->join_failures() > 0 || engine.control().unanswered().has_value();
  };
  const Status status = await_standing(visit, answered, [&] {
    if (clock_now() < remind) return;
    std::string line = engine.session().welcomed()
                           ? kWaitingForAdmission
                           : "waiting for the master at " + listed(options_.masters) + " to answer";
    if (engine.admission().waiting_for() > 0) {
      line = "waiting for " + plural(engine.admission().waiting_for(), "more peer");
    } else if (unreached()) {
      line = no_master(options_.masters, *runtime, engine.control()) + "; trying again";
    }
    if (line == logged) return;
    logged = line;
    if (!options_.quiet) log(LogLevel::warn, options_.name, line);
  });
  if (!status && status.error().code == Code::interrupted) return status;
  if (engine.standing() == peer::Standing::out) return engine.end();
  if (engine.standing() == peer::Standing::joining) {
    if (unreached())
      return Status(Code::unreachable, no_master(options_.masters, *runtime, engine.control()));
    if (engine.admission().waiting_for() > 0) {
      return Status(Code::timeout, plural(engine.admission().waiting_for(), "more peer") +
                                       " did not come in time");
    }
    return Status(Code::timeout, "not let in within the timeout");
  }
  look(engine, engine.admission().admitted());
  joined_ = true;
  return {};
}

void Communicator::close(const std::string& failure) {
  if (inert() || closed_.exchange(true)) return;
  std::shared_ptr<Runtime> runtime;
  {
    const std::lock_guard lock(mutex_);
    runtime = runtime_;
  }
  if (runtime == nullptr) return;
  {
    io::LoopDriver& driver = runtime->driver();
    const DefaultFloats floats;
    const io::Turn turn(driver);
    driver.wait([&] { return !runtime->between_masters(); }, clock_now() + kTakeoverGrace);
    runtime->engine().leave(failure, clock_now());
    runtime->act();
    driver.wait([&] { return runtime->control_flushed(); }, clock_now() + kLeaveGrace);
  }
  runtime->shut();
}

// ---- collective calls

Result<bool> Communicator::admit(const Limit& limit) {
  return as_member(limit, [&](Visit& visit) -> Result<bool> {
    peer::Engine& engine = visit.engine();
    peer::Admission& admission = engine.admission();
    if (admission.fresh()) {
      admission.use_fresh();
      admission.pass_point();
      return true;
    }
    const Status finished = finish_own(visit);
    const bool others = engine.standing() == peer::Standing::member &&
                        engine.session().record()->members.size() > 1;
    if (!finished && others) {
      // The others wait in this round, or will; or they have passed the point without one.
      if (admission.round_needed()) {
        decline_round(visit, wire::RoundKind::admit, finished.error().code);
      } else {
        admission.pass_point();
      }
    }
    if (!finished) return finished.error();
    if (engine.standing() == peer::Standing::out) return engine.end();
    if (!admission.round_needed() && others) {
      admission.pass_point();
      return false;
    }
    const std::uint64_t before = engine.session().record()->admission;
    const auto call = admission_point(visit, wire::RoundKind::admit);
    if (!call) return call.error();
    admission.use_fresh();
    admission.pass_point();
    return (*call)->record->admission != before;
  });
}

Status Communicator::settle(const Limit& limit) {
  const auto found = runtime();
  if (!found) return found.error();
  const Until until(limit);
  Visit visit(*found, until);
  return visit.engine().standing() == peer::Standing::member ? finish_own(visit) : Status();
}

Status Communicator::update_topology(const Limit& limit) {
  return as_member(limit, [&](Visit& visit) -> Status {
    peer::Admission& admission = visit.engine().admission();
    if (Status status = check_finished(visit.engine()); !status) return status;
    if (!admission.fresh()) {
      const auto call = round(visit, wire::RoundKind::admit);
      if (!call) return call.error();
    }
    admission.use_fresh();
    admission.pass_point();
    return {};
  });
}

Result<bool> Communicator::peers_pending(const Limit& limit) {
  return as_member(limit, [&](Visit& visit) -> Result<bool> {
    visit.engine().admission().use_fresh();
    const auto call = round(visit, wire::RoundKind::peers_pending);
    if (!call) return call.error();
    return (*call)->answer != 0;
  });
}

Status Communicator::barrier(const Limit& limit) {
  return as_member(limit, [&](Visit& visit) -> Status {
    visit.engine().admission().use_fresh();
    if (alone(visit)) return {};
    const auto call = round(visit, wire::RoundKind::barrier);
    return call ? Status() : Status(call.error());
  });
}

Status Communicator::optimize(const Limit& limit) {
  return as_member(limit, [&](Visit& visit) -> Status {
    if (Status status = check_finished(visit.engine()); !status) return status;
    visit.engine().admission().use_fresh();
    if (alone(visit)) return {};
    return optimize_now(visit);
  });
}

Result<peer::CallPtr> Communicator::sync(std::vector<state::LocalEntry> entries,
                                         wire::SyncVote vote, const Progress& progress,
                                         const StateCheck& check, const Limit& limit,
                                         const SyncOptions& options) {
  const auto found = runtime();
  if (!found) return found.error();
  const Until until(limit);
  const auto admits = [&](peer::Engine& engine) {
    return vote.owned && options.lets_in && !engine.admission().owes_sync() &&
           (engine.admission().round_needed() || engine.session().record()->members.size() == 1);
  };
  // Before this peer votes. The others wait for it, or will.
  const auto give_up_early = [&](Visit& visit, Code code) {
    peer::Engine& engine = visit.engine();
    if (engine.standing() != peer::Standing::member ||
        engine.session().record()->members.size() == 1)
      return;
    const bool admission = admits(engine);
    if (!admission && vote.owned) engine.admission().pass_point();
    decline_round(visit, admission ? wire::RoundKind::sync_admit : wire::RoundKind::sync, code);
  };
  {
    // Operations in flight may write what is hashed next.
    Visit visit(*found, until);
    const Status usable = vote.owned ? Status() : check_finished(visit.engine());
    if (!usable) return usable.error();
    if (const Status status = finish_own(visit); !status) {
      give_up_early(visit, status.error().code);
      return status.error();
    }
  }
  // Hashed without the turn, so that the loop goes on and other threads may call.
  io::Workers workers(state_threads(entries));
  const auto stop = [&] { return until.passed() || (limit.interrupted && limit.interrupted()); };
  auto state = state::hash(std::move(entries), workers, stop);
  if (!state) {
    if (state.error().code != Code::interrupted) return state.error();
    Visit visit(*found, until);
    const bool late = until.passed();
    give_up_early(visit, late ? Code::timeout : Code::interrupted);
    if (late) return {Code::timeout, "the deadline passed while the state was hashed"};
    return state.error();
  }

  vote.whole = whole_;
  MixedStates& mixed_states = MixedStates::of_process();
  const std::optional<std::uint64_t> mixed = mixed_states.find(**state);
  vote.mixed = mixed.has_value();
  for (state::LocalEntry& entry : (*state)->entries)
    entry.overwritten = mixed && entry.writable != nullptr;
  vote.flaw = (*state)->flaw;
  overwrote_ = false;
  (*state)->overwrite = options.overwrite;
  peer::CallPtr call;
  Status status;
  {
    Visit visit(*found, until);
    peer::Engine& engine = visit.engine();
    if (status = become_member(visit); !status) return status.error();
    if (admits(engine)) {
      const auto point = admission_point(visit, wire::RoundKind::sync_admit, [&](Code code) {
        engine.admission().pass_point();
        decline_round(visit, wire::RoundKind::sync, code);
      });
      if (!point) return point.error();
    }
    if (vote.owned) engine.admission().pass_point();
    call = engine.start_sync({*state, vote, static_cast<bool>(check), &workers}, clock_now());
    visit.runtime().act();
    Limit reporting = limit;
    reporting.interrupted = [&] {
      if (progress && call->bytes_wanted > 0) progress(call->bytes_done, call->bytes_wanted);
      return limit.interrupted && limit.interrupted();
    };
    Until reporting_until(reporting);
    reporting_until.deadline = until.deadline;
    const auto reply = [&] {
      const std::vector<wire::StateEntry> question = engine.take_question(call);
      if (question.empty()) return;
      std::optional<Error> answer;
      visit.outside([&] { answer = check(question); });
      if (answer) engine.answer(call, *answer, clock_now());
      visit.runtime().act();
    };
    status = await_call(visit, call, reporting_until, true,
                        check ? std::function<void()>(reply) : std::function<void()>());
  }
  const bool committed = call->done && call->update;
  if (committed) {
    state::Update& update = *call->update;
    whole_ = update.written.empty() && update.replacements.empty();
    update.place(workers);
    if (mixed) mixed_states.forget(*mixed);
    if (progress && call->bytes_wanted > 0) progress(call->bytes_done, call->bytes_wanted);
  }
  // The others have a committed state, so an interrupted caller gets it, too.
  if (!status && !committed) {
    if (!(*state)->mixed) return status.error();
    state::hash_unknown(**state);
    mixed_states.note(**state);
    if (mixed) mixed_states.forget(*mixed);
    overwrote_ = true;
    Error error = status.error();
    error.reason += "; a part of this peer's state was overwritten";
    return error;
  }
  for (const wire::Divergence& odd : call->update->decision.diverged) {
    std::string names;
    for (const std::string& name : odd.names) names += " " + name;
    log(LogLevel::warn, options_.name,
        "peer " + wire::shown_name(call->record->members, odd.peer) +
            " had another state than the group, now overwritten:" + names,
        call->record->epoch);
  }
  return call;
}

Result<peer::CallPtr> Communicator::begin(Visit& visit, peer::OperationRequest request) {
  peer::Engine& engine = visit.engine();
  engine.admission().use_fresh();
  {
    const std::lock_guard lock(mutex_);
    request.view = view_.record;
  }
  const peer::CallPtr call = engine.start_operation(std::move(request), clock_now());
  visit.runtime().act();
  // This peer was alone from the start. Later failures are returned by wait.
  if (call->done && call->attempts == 0 && call->error.code == Code::too_few_peers) {
    look(engine, call->record);
    return call->error;
  }
  return call;
}

Result<peer::CallPtr> Communicator::start(peer::OperationRequest request, const Limit& limit) {
  if (const auto found = runtime(); !found) return found.error();
  if (const Status claimed = claim_order(request); !claimed) return claimed.error();
  return as_member(limit, [&](Visit& visit) { return begin(visit, std::move(request)); });
}

Status Communicator::reduce(peer::OperationRequest request, const Limit& limit,
                            const std::function<void(const peer::CallPtr&)>& started) {
  if (const auto found = runtime(); !found) return found.error();
  if (const Status claimed = claim_order(request); !claimed) return claimed.error();
  return as_member(limit, [&](Visit& visit) -> Status {
    const Result<peer::CallPtr> call = begin(visit, std::move(request));
    if (!call) return call.error();
    started(*call);
    return await_call(visit, *call, visit.until(), true);
  });
}

Status Communicator::wait(const peer::CallPtr& call, const Limit& limit) {
  if (inert()) return runtime().error();
  std::shared_ptr<Runtime> runtime;
  {
    const std::lock_guard lock(mutex_);
    runtime = runtime_;
    if (call->done.load(std::memory_order_acquire)) {  // without disturbing the driver of the loop
      see(call->record);
      return call->error.code == Code::ok ? Status() : Status(call->error);
    }
  }
  const Until until(limit);
  Visit visit(runtime, until);
  return await_call(visit, call, until, true);
}

// ---- what is known

Result<View> Communicator::view() {
  if (const auto found = runtime(); !found) return found.error();
  const std::lock_guard lock(mutex_);
  return view_;
}

Result<peer::Record> Communicator::newest() {
  const auto found = runtime();
  if (!found) return found.error();
  return (*found)->newest();
}

Result<Statistics> Communicator::statistics() {
  const auto found = runtime();
  if (!found) return found.error();
  const io::Turn turn((*found)->driver());
  const peer::Engine& engine = (*found)->engine();
  return Statistics{engine.totals(), engine.news().joined(), engine.news().lost(),
                    engine.news().departures(), engine.links().stripes_by_peer()};
}

std::uint64_t Communicator::seen_epoch() {
  const std::lock_guard lock(mutex_);
  return view_.record == nullptr ? 0 : view_.record->epoch;
}

std::size_t Communicator::unfinished() {
  if (inert()) return 0;
  const std::lock_guard lock(mutex_);
  return runtime_ == nullptr ? 0 : runtime_->unfinished();
}

void Communicator::drop_in(const std::function<void(peer::Engine&)>& use) {
  const auto found = runtime();
  if (!found) return;
  const Limit limit;
  const Until until(limit);
  Visit visit(*found, until);
  use(visit.engine());
  visit.runtime().act();
}

void Communicator::drain() {
  drop_in([](peer::Engine& engine) { engine.drain(clock_now()); });
}

void Communicator::expect_operation(Duration in, const measured::Announcement& announced) {
  drop_in([&](peer::Engine& engine) {
    const Instant now = clock_now();
    engine.expect_operation(now + in, announced, now);
  });
}

void Communicator::wait_no_longer_than(const wire::Patience& patience) {
  drop_in([&](peer::Engine& engine) { engine.wait_no_longer_than(patience, clock_now()); });
}

bool Communicator::draining() {
  if (inert() || !joined_) return false;
  const std::lock_guard lock(mutex_);
  return runtime_->draining();
}

bool Communicator::is_open() {
  if (inert() || closed_ || !joined_) return false;
  const std::lock_guard lock(mutex_);
  return runtime_->standing() != peer::Standing::out;
}

}  // namespace pccl::node
