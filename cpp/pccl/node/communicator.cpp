#include "pccl/node/communicator.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/base/fork.h"
#include "pccl/base/log.h"
#include "pccl/base/text.h"
#include "pccl/io/address.h"

#ifndef PCCL_VERSION
#define PCCL_VERSION "unknown"
#endif

namespace pccl::node {
namespace {

constexpr Duration kSlice = std::chrono::milliseconds(100);  // between two looks for Ctrl-C
constexpr Duration kVerdictGrace =
    std::chrono::seconds(3);  // the engine leaves the run by itself before
// More than links are ever measured for (see prober.h). Who has less time says no.
constexpr Duration kMeasuringTakes = std::chrono::seconds(6);
constexpr Duration kLeaveGrace = std::chrono::seconds(1);
constexpr Duration kRemind = std::chrono::seconds(1);  // then a peer says what it waits for
constexpr const char* kWaitingForAdmission =
    "waiting to be let in by the members, at their next pccl.admit() or pccl.sync()";
constexpr unsigned kMaxHashThreads = 8;

std::optional<Instant> deadline_of(const Limit& limit) {
  if (!limit.timeout) return std::nullopt;
  return clock_now() + *limit.timeout;
}

bool passed(const std::optional<Instant>& deadline) { return deadline && clock_now() >= *deadline; }

std::string no_master(const std::string& master, const std::string& failure) {
  return "no master at " + failure_at(master, failure);
}

Status closed_error() { return Status(Code::invalid_usage, "this communicator is closed"); }

// Tells every runtime that the thread has used when it ends.
class ThreadTrace {
 public:
  ~ThreadTrace() {
    if (fork_generation() != generation_) return;
    for (const auto& used : used_) {
      if (const auto runtime = used.lock()) Runtime::thread_ended(runtime, *life_);
    }
  }
  std::uint64_t number() const { return *life_; }
  const std::shared_ptr<const std::uint64_t>& life() const { return life_; }
  void uses(const std::shared_ptr<Runtime>& runtime) {
    bool known = false;
    std::erase_if(used_, [&](const std::weak_ptr<Runtime>& used) {
      known = known || (!used.owner_before(runtime) && !runtime.owner_before(used));
      return used.expired();
    });
    if (!known) used_.push_back(runtime);
  }

 private:
  static std::uint64_t next_number() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
  }
  const std::shared_ptr<const std::uint64_t> life_ =
      std::make_shared<const std::uint64_t>(next_number());
  const std::uint64_t generation_ = fork_generation();
  std::vector<std::weak_ptr<Runtime>> used_;
};

ThreadTrace& this_thread() {
  thread_local ThreadTrace trace;
  return trace;
}

Error unfinished_error(const peer::Engine& engine) {
  const std::size_t count = engine.calls().unfinished();
  return {Code::pending_operations,
          std::to_string(count) + (count == 1 ? " operation" : " operations") +
              " of this communicator not finished yet",
          {},
          {}};
}

}  // namespace

// A call of one thread: has the turn, and counts as inside for the stuck rule.
class Communicator::Visit {
 public:
  explicit Visit(std::shared_ptr<Runtime> runtime)
      : runtime_(std::move(runtime)), turn_(runtime_->driver()), thread_(this_thread().number()) {
    this_thread().uses(runtime_);
    engine().threads().inside(thread_);
  }
  ~Visit() {
    engine().threads().outside(thread_);
    runtime_->act();
    if (runtime_->unfinished() != 0) runtime_->driver().attend();
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  Runtime& runtime() { return *runtime_; }
  peer::Engine& engine() { return runtime_->engine(); }
  std::uint64_t thread() const { return thread_; }
  // Others may have the turn meanwhile.
  template <class Work>
  void outside(const Work& work) {
    runtime_->driver().release();
    work();
    runtime_->driver().acquire();
  }
  // Asks for Ctrl-C. Others may have the turn meanwhile.
  bool interrupted(const Limit& limit) {
    if (!limit.interrupted) return false;
    runtime_->driver().release();
    const bool answer = limit.interrupted();
    runtime_->driver().acquire();
    return answer;
  }

 private:
  std::shared_ptr<Runtime> runtime_;  // outlives the turn
  io::Turn turn_;
  std::uint64_t thread_;
};

Communicator::Communicator(CommunicatorOptions options)
    : options_(std::move(options)), generation_(fork_generation()) {}

Communicator::~Communicator() {
  if (inert()) {
    new std::shared_ptr<Runtime>(
        std::move(runtime_));  // it cannot be destroyed without its threads
    return;
  }
  close();
}

bool Communicator::inert() const { return fork_generation() != generation_; }

Result<std::shared_ptr<Runtime>> Communicator::runtime() {
  if (inert()) {
    return Error{Code::invalid_usage,
                 "this process was forked; its copy of the communicator cannot be used",
                 {},
                 {}};
  }
  if (closed_) return closed_error().error();
  const std::lock_guard lock(mutex_);
  if (runtime_ == nullptr) return Error{Code::invalid_usage, "not joined yet", {}, {}};
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
// ---------------------------------------------------------------------------------------------

// A call without a tag (level 1: with the default one) meets the others' by its order. One thread
// makes such calls: nobody knows the order in which the program means several to make theirs. A
// thread that has ended has handed over.
Status Communicator::claim_order(const peer::OperationRequest& request) {
  const bool level_1 = request.alone_is_error;
  if (request.any_thread || (request.tag && !(level_1 && *request.tag == 0))) return {};
  const std::uint64_t thread = this_thread().number();
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
    if (owner_.thread != owner.thread) continue;  // another one has taken over meanwhile
    if (ended) break;
    const std::string reason =
        level_1 ? "another thread makes the reductions with tag 0, the default, and these meet by "
                  "the order of one thread's calls; pass other tags here, or call from that thread"
                : "another thread makes the calls without a tag, and these meet by the order of "
                  "one thread's calls; pass tag= here, or call from that thread";
    return Status(Code::invalid_usage, reason);
  }
  owner_ = {thread, this_thread().life(), caller};
  return {};
}

// ---- waiting
// ------------------------------------------------------------------------------------------------------

// `give_up`: a deadline or Ctrl-C ends the call itself, for all members; else only this wait for
// it.
Status Communicator::await_call(Visit& visit, const peer::CallPtr& call, const Deadline& deadline,
                                const Limit& limit, bool give_up,
                                const std::function<void()>& reply) {
  peer::Engine& engine = visit.engine();
  const auto done = [&] { return call->done.load(std::memory_order_acquire); };
  const auto due = [&] { return done() || (reply && call->asks.load(std::memory_order_acquire)); };
  Code gave_up = Code::ok;
  if (!done()) {
    engine.threads().waits(visit.thread(), call, clock_now());
    Instant last = Instant::max();  // give_up: until then the engine ends the call
    for (;;) {
      Instant until = clock_now() + kSlice;
      if (gave_up == Code::ok && deadline) until = std::min(until, *deadline);
      if (gave_up == Code::ok && visit.runtime().driver().wait(due, until)) {
        if (done()) break;
        reply();
        continue;
      }
      if (gave_up != Code::ok && visit.runtime().driver().wait(done, until)) break;
      if (gave_up == Code::ok) {
        const bool interrupted = visit.interrupted(limit);
        if (done() && !interrupted) break;
        if (interrupted) {
          gave_up = Code::interrupted;
        } else if (passed(deadline)) {
          gave_up = Code::timeout;
        } else {
          continue;
        }
        if (!give_up || done()) break;
        engine.abort(call, gave_up, clock_now());
        visit.runtime().act();
        last = clock_now() + kVerdictGrace;
      } else if (clock_now() >= last) {
        engine.leave("no verdict came", clock_now());
        visit.runtime().act();
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

// `remind` is called once a slice.
Status Communicator::await_standing(Visit& visit, const std::function<bool()>& done,
                                    const Deadline& deadline, const Limit& limit,
                                    const std::function<void()>& remind) {
  for (;;) {
    Instant until = clock_now() + kSlice;
    if (deadline) until = std::min(until, *deadline);
    if (visit.runtime().driver().wait(done, until)) return {};
    if (visit.interrupted(limit)) return Status(Code::interrupted, "interrupted");
    if (done()) return {};
    if (passed(deadline)) return Status(Code::timeout, "the deadline passed");
    remind();
  }
}

// A newcomer's first collective call waits here.
Status Communicator::become_member(Visit& visit, const Deadline& deadline, const Limit& limit) {
  Runtime& runtime = visit.runtime();
  peer::Engine& engine = visit.engine();
  if (engine.standing() != peer::Standing::out && engine.standing() != peer::Standing::member) {
    engine.request_admission(clock_now());
    runtime.act();
    std::optional<Instant> remind = clock_now() + kRemind;
    const Status status = await_standing(
        visit,
        [&] {
          return runtime.standing() == peer::Standing::member ||
                 runtime.standing() == peer::Standing::out;
        },
        deadline, limit,
        [&] {
          if (!passed(remind)) return;
          remind.reset();
          log(LogLevel::warn, id_, kWaitingForAdmission);
        });
    if (!status) {
      engine.withdraw_admission(clock_now());
      runtime.act();
      if (status.error().code != Code::timeout) return status;
      return Status(Code::timeout, "the members did not let this peer in within the timeout");
    }
    // Only if it has said that it waits.
    if (engine.standing() == peer::Standing::member && !remind)
      log(LogLevel::warn, id_, "let in: " + plural(engine.record()->members.size(), "member"));
  }
  if (engine.standing() == peer::Standing::out) return engine.end();
  const std::lock_guard lock(mutex_);
  if (view_.record == nullptr) {
    see(engine.admission().admitted());
    view_.census = engine.census();
  }
  return {};
}

// Ends the next round of that kind for all, or leaves the run.
void Communicator::give_up(Visit& visit, wire::RoundKind kind, Code code) {
  const peer::CallPtr call = visit.engine().give_up(kind, code, clock_now());
  visit.runtime().act();
  (void)await_call(visit, call, {}, {}, true);
}

// Level 2's. `gave_up`: the round was decided, but this peer will not be in what the others go on
// to.
Result<peer::CallPtr> Communicator::admission_point(Visit& visit, wire::RoundKind kind,
                                                    const Deadline& deadline, const Limit& limit,
                                                    const std::function<void(Code)>& gave_up) {
  peer::Engine& engine = visit.engine();
  // Replicas count the points that they have passed: one that fails later cannot be taken back.
  const bool repeatable =
      kind == wire::RoundKind::sync_admit || engine.record()->ranks_per_replica == 0;
  const bool has_time = !deadline || *deadline - clock_now() > kMeasuringTakes;
  const bool measures = repeatable && has_time && !engine.optimizing();
  const peer::CallPtr call = engine.enter(kind, clock_now(), wire::AdmissionPoint{measures});
  visit.runtime().act();
  Status status = await_call(visit, call, deadline, limit, true);
  const bool decided = call->done && call->error.code == Code::ok;
  if (decided && call->answer != 0) {
    if (status) {
      const peer::CallPtr measuring = engine.start_optimize(clock_now());
      visit.runtime().act();
      // Without it everything goes on as before. Only who has to stop does; and if somebody had to,
      // all members are at this point again, or in a sync that fails for all.
      const Status measured = await_call(visit, measuring, deadline, limit, true);
      const bool again = kind == wire::RoundKind::admit && measuring->error.code == Code::peer_lost;
      const bool stops = !measured && (measured.error().code == Code::interrupted ||
                                       engine.standing() == peer::Standing::out);
      if (!measured && (stops || again)) status = measured;
    } else {
      give_up(visit, wire::RoundKind::optimize, status.error().code);
    }
  }
  if (status) return call;
  if (decided && gave_up) gave_up(status.error().code);
  return status.error();
}

Result<peer::CallPtr> Communicator::round(Visit& visit, wire::RoundKind kind,
                                          const Deadline& deadline, const Limit& limit) {
  const peer::CallPtr call = visit.engine().enter(kind, clock_now());
  visit.runtime().act();
  if (const Status status = await_call(visit, call, deadline, limit, true); !status)
    return status.error();
  return call;
}

// ---- joining and leaving
// ------------------------------------------------------------------------------------------

Status Communicator::join(const JoinRequest& request, const Limit& limit) {
  if (inert() || closed_) return runtime().error();
  const Deadline deadline = deadline_of(limit);
  RuntimeOptions options;
  options.master = options_.master;
  options.settings = options_.settings;
  options.port = options_.port;
  options.advertise = options_.advertise;
  options.secret = options_.secret;
  options.join.id = id_;
  options.join.group = options_.group;
  options.join.min_peers = request.min_peers;
  options.join.waiting = true;
  options.join.start_only = !request.enter;
  options.join.order = options_.settings.local_rank;
  options.join.replica = options_.replica;
  options.join.ranks_per_replica = options_.ranks_per_replica;
  options.join.software = std::string("pccl ") + PCCL_VERSION;
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
  Visit visit(runtime);
  peer::Engine& engine = visit.engine();
  const std::string master = wire::to_string(options_.master);
  const Instant remind = clock_now() + kRemind;
  std::string said;
  const Status status = await_standing(
      visit,
      [&] {
        return runtime->standing() != peer::Standing::joining ||
               runtime->join_failures() >= request.attempts;
      },
      deadline, limit,
      [&] {
        if (clock_now() < remind) return;
        std::string line = kWaitingForAdmission;
        if (engine.admission().waiting_for() > 0) {
          line = "waiting for " + plural(engine.admission().waiting_for(), "more peer");
        } else if (runtime->join_failures() > 0) {
          line = no_master(master, runtime->dial_failure()) + "; trying again";
        }
        if (line == said) return;
        said = line;
        log(LogLevel::warn, id_, line);
      });
  if (!status && status.error().code == Code::interrupted) return status;
  if (engine.standing() == peer::Standing::out) return engine.end();
  if (engine.standing() == peer::Standing::joining) {
    if (runtime->join_failures() > 0) {
      return Status(Code::unreachable, no_master(master, runtime->dial_failure()));
    }
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
    const io::Turn turn(runtime->driver());
    runtime->engine().leave(failure, clock_now());
    runtime->act();
    runtime->driver().wait([&] { return runtime->control_flushed(); }, clock_now() + kLeaveGrace);
  }
  runtime->shut();
}

// Waits for the operations that this peer has started. How each ends is told to who waits for it.
// A deadline or Ctrl-C ends those that are left, for all members: this peer goes on without them.
Status Communicator::finish_own(Visit& visit, const Deadline& deadline, const Limit& limit) {
  const std::vector<peer::CallPtr> own = visit.engine().calls().operation_calls();
  Status stopped;
  for (const peer::CallPtr& call : own) {
    const Status status = await_call(visit, call, deadline, limit, false);
    const bool interrupted = !status && status.error().code == Code::interrupted;
    if (call->done && !interrupted) continue;
    stopped = status;
    break;
  }
  if (stopped) return {};
  for (const peer::CallPtr& call : own)
    visit.engine().abort(call, stopped.error().code, clock_now());
  visit.runtime().act();
  for (const peer::CallPtr& call : own) (void)await_call(visit, call, {}, {}, true);
  return stopped;
}

// ---- collective calls
// ---------------------------------------------------------------------------------------------

Result<bool> Communicator::admit(const Limit& limit) {
  const auto found = runtime();
  if (!found) return found.error();
  const Deadline deadline = deadline_of(limit);
  Visit visit(*found);
  peer::Engine& engine = visit.engine();
  if (const Status status = become_member(visit, deadline, limit); !status) return status.error();
  if (engine.admission().fresh()) {
    engine.admission().use_fresh();
    engine.admission().pass_point();
    return true;
  }
  const Status finished = finish_own(visit, deadline, limit);
  if (!finished && engine.standing() == peer::Standing::member &&
      engine.record()->members.size() > 1) {
    // The others wait in this round, or will; or they have passed the point without one.
    if (engine.admission().round_needed()) {
      give_up(visit, wire::RoundKind::admit, finished.error().code);
    } else {
      engine.admission().pass_point();
    }
  }
  if (!finished) return finished.error();
  if (engine.standing() == peer::Standing::out) return engine.end();
  if (!engine.admission().round_needed() && engine.record()->members.size() > 1) {
    engine.admission().pass_point();
    return false;
  }
  const std::uint64_t before = engine.record()->admission;
  const auto call = admission_point(visit, wire::RoundKind::admit, deadline, limit);
  if (!call) return call.error();
  engine.admission().use_fresh();
  engine.admission().pass_point();
  return (*call)->record->admission != before;
}

Status Communicator::update_topology(const Limit& limit) {
  const auto found = runtime();
  if (!found) return found.error();
  const Deadline deadline = deadline_of(limit);
  Visit visit(*found);
  peer::Engine& engine = visit.engine();
  if (engine.calls().unfinished() > 0) return unfinished_error(engine);
  if (const Status status = become_member(visit, deadline, limit); !status) return status;
  if (!engine.admission().fresh()) {
    const auto call = round(visit, wire::RoundKind::admit, deadline, limit);
    if (!call) return call.error();
  }
  engine.admission().use_fresh();
  engine.admission().pass_point();
  return {};
}

Result<bool> Communicator::peers_pending(const Limit& limit) {
  const auto found = runtime();
  if (!found) return found.error();
  const Deadline deadline = deadline_of(limit);
  Visit visit(*found);
  if (const Status status = become_member(visit, deadline, limit); !status) return status.error();
  visit.engine().admission().use_fresh();
  const auto call = round(visit, wire::RoundKind::peers_pending, deadline, limit);
  if (!call) return call.error();
  return (*call)->answer != 0;
}

Status Communicator::barrier(const Limit& limit) {
  const auto found = runtime();
  if (!found) return found.error();
  const Deadline deadline = deadline_of(limit);
  Visit visit(*found);
  peer::Engine& engine = visit.engine();
  if (const Status status = become_member(visit, deadline, limit); !status) return status;
  engine.admission().use_fresh();
  if (engine.record()->members.size() == 1) {
    look(engine, engine.record());
    return {};
  }
  const auto call = round(visit, wire::RoundKind::barrier, deadline, limit);
  if (!call) return call.error();
  return {};
}

Status Communicator::optimize(const Limit& limit) {
  const auto found = runtime();
  if (!found) return found.error();
  const Deadline deadline = deadline_of(limit);
  Visit visit(*found);
  peer::Engine& engine = visit.engine();
  if (engine.calls().unfinished() > 0) return unfinished_error(engine);
  if (const Status status = become_member(visit, deadline, limit); !status) return status;
  engine.admission().use_fresh();
  if (engine.record()->members.size() == 1) {
    look(engine, engine.record());
    return {};
  }
  const peer::CallPtr call = engine.start_optimize(clock_now());
  visit.runtime().act();
  return await_call(visit, call, deadline, limit, true);
}

Result<peer::CallPtr> Communicator::sync(std::vector<state::LocalEntry> entries,
                                         wire::SyncVote vote, const Progress& progress,
                                         const StateCheck& check, const Limit& limit) {
  const auto found = runtime();
  if (!found) return found.error();
  const Deadline deadline = deadline_of(limit);
  const auto admits = [&](peer::Engine& engine) {
    return vote.owned && !engine.admission().owes_sync() &&
           (engine.admission().round_needed() || engine.record()->members.size() == 1);
  };
  // Before this peer votes. The others wait for it, or will.
  const auto give_up_early = [&](Visit& visit, Code code) {
    peer::Engine& engine = visit.engine();
    if (engine.standing() != peer::Standing::member || engine.record()->members.size() == 1) return;
    const bool admission = admits(engine);
    if (!admission && vote.owned) engine.admission().pass_point();
    give_up(visit, admission ? wire::RoundKind::sync_admit : wire::RoundKind::sync, code);
  };
  {
    // What runs may write what is to be hashed.
    Visit visit(*found);
    if (!vote.owned && visit.engine().calls().unfinished() > 0)
      return unfinished_error(visit.engine());
    if (const Status status = finish_own(visit, deadline, limit); !status) {
      give_up_early(visit, status.error().code);
      return status.error();
    }
  }
  // Without the turn: others may work meanwhile, and the loop goes on.
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  const auto stop = [&] { return passed(deadline) || (limit.interrupted && limit.interrupted()); };
  auto state = state::hash(std::move(entries), std::min(cores, kMaxHashThreads), stop);
  if (!state) {
    if (state.error().code != Code::interrupted) return state.error();
    Visit visit(*found);
    const Code code = passed(deadline) ? Code::timeout : Code::interrupted;
    give_up_early(visit, code);
    if (code == Code::timeout)
      return Error{code, "the deadline passed while the state was hashed", {}, {}};
    return state.error();
  }

  vote.whole = whole_;
  vote.flaw = (*state)->flaw;
  peer::CallPtr call;
  Status status;
  {
    Visit visit(*found);
    peer::Engine& engine = visit.engine();
    if (status = become_member(visit, deadline, limit); !status) return status.error();
    if (admits(engine)) {
      const auto gave_up = [&](Code code) {
        engine.admission().pass_point();
        give_up(visit, wire::RoundKind::sync, code);
      };
      const auto point =
          admission_point(visit, wire::RoundKind::sync_admit, deadline, limit, gave_up);
      if (!point) return point.error();
    }
    if (vote.owned) engine.admission().pass_point();
    call = engine.start_sync({*state, vote, static_cast<bool>(check)}, clock_now());
    visit.runtime().act();
    Limit telling = limit;
    telling.interrupted = [&] {
      if (progress && call->bytes_wanted > 0) progress(call->bytes_done, call->bytes_wanted);
      return limit.interrupted && limit.interrupted();
    };
    const auto reply = [&] {
      const std::vector<wire::StateEntry> question = engine.take_question(call);
      if (question.empty()) return;
      std::optional<Error> answer;
      visit.outside([&] { answer = check(question); });
      if (answer) engine.answer(call, *answer, clock_now());
      visit.runtime().act();
    };
    status = await_call(visit, call, deadline, telling, true,
                        check ? std::function<void()>(reply) : std::function<void()>());
  }
  if (call->done && call->update) {
    state::Update& update = *call->update;
    whole_ = update.written.empty() && update.replacements.empty();
    // Also when the caller was interrupted meanwhile: the others have it.
    for (const state::Update::Copy& copy : update.copies)
      std::memcpy(copy.to, copy.from, copy.bytes);
    update.copies.clear();
    update.staging.clear();
    if (progress && call->bytes_wanted > 0) progress(call->bytes_done, call->bytes_wanted);
  }
  // Committed is committed: an interrupted caller gets it too (Limit::interrupted has told).
  if (!status && !(call->done && call->update)) return status.error();
  for (const wire::Divergence& odd : call->update->decision.diverged) {
    std::string names;
    for (const std::string& name : odd.names) names += " " + name;
    log(LogLevel::warn, id_,
        "peer " + odd.peer.brief() + " had another state than the group, now overwritten:" + names);
  }
  return call;
}

Result<peer::CallPtr> Communicator::begin(Visit& visit, peer::OperationRequest request,
                                          const Deadline& deadline, const Limit& limit) {
  peer::Engine& engine = visit.engine();
  if (const Status status = become_member(visit, deadline, limit); !status) return status.error();
  engine.admission().use_fresh();
  {
    const std::lock_guard lock(mutex_);
    request.view = view_.record;
  }
  const peer::CallPtr call = engine.start_operation(std::move(request), clock_now());
  visit.runtime().act();
  // Alone from the start: told here. What ends an operation later is told to who waits for it.
  if (call->done && call->attempts == 0 && call->error.code == Code::too_few_peers) {
    look(engine, call->record);
    return call->error;
  }
  return call;
}

Result<peer::CallPtr> Communicator::start(peer::OperationRequest request, const Limit& limit) {
  const auto found = runtime();
  if (!found) return found.error();
  const Deadline deadline = deadline_of(limit);
  if (const Status claimed = claim_order(request); !claimed) return claimed.error();
  Visit visit(*found);
  return begin(visit, std::move(request), deadline, limit);
}

Status Communicator::reduce(peer::OperationRequest request, const Limit& limit,
                            const std::function<void(const peer::CallPtr&)>& started) {
  const auto found = runtime();
  if (!found) return found.error();
  const Deadline deadline = deadline_of(limit);
  if (const Status claimed = claim_order(request); !claimed) return claimed.error();
  Visit visit(*found);
  const Result<peer::CallPtr> call = begin(visit, std::move(request), deadline, limit);
  if (!call) return call.error();
  started(*call);
  return await_call(visit, *call, deadline, limit, true);
}

Status Communicator::wait(const peer::CallPtr& call, const Limit& limit) {
  if (inert()) return runtime().error();
  std::shared_ptr<Runtime> runtime;
  {
    const std::lock_guard lock(mutex_);
    runtime = runtime_;
    if (call->done.load(std::memory_order_acquire)) {  // no need to disturb who drives
      see(call->record);
      return call->error.code == Code::ok ? Status() : Status(call->error);
    }
  }
  const Deadline deadline = deadline_of(limit);
  Visit visit(runtime);
  return await_call(visit, call, deadline, limit, true);
}

// ---- what is known
// ------------------------------------------------------------------------------------------------

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

std::size_t Communicator::unfinished() {
  if (inert()) return 0;
  const std::lock_guard lock(mutex_);
  return runtime_ == nullptr ? 0 : runtime_->unfinished();
}

bool Communicator::is_open() {
  if (inert() || closed_ || !joined_) return false;
  const std::lock_guard lock(mutex_);
  return runtime_->standing() != peer::Standing::out;
}

}  // namespace pccl::node
