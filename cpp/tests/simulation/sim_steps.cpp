// The steps of users' programs: calls, waiting, admission, syncs, bursts of operations.
#include <algorithm>
#include <utility>

#include "tests/simulation/sim_world.h"

namespace pccl::simulation {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr std::uint64_t kSyncStructure = 77;

}  // namespace

bool UserProgram::out() const { return host_.engine().standing() == peer::Standing::out; }

std::uint64_t UserProgram::own_rank() const {
  const auto& members = host_.engine().session().record()->members;
  for (std::uint64_t rank = 0; rank < members.size(); ++rank) {
    if (members[rank].id == host_.engine().session().id()) return rank;
  }
  return members.size();
}

Random UserProgram::script_for(std::uint64_t step, std::uint64_t salt) const {
  Random mix(host_.world().seed() ^ (step * 0x9e3779b97f4a7c15) ^ (salt << 56));
  return Random(mix.next());
}

// Ends the program. The peer leaves, and may return as a newcomer if it was removed.
void UserProgram::end() {
  peer::Engine& engine = host_.engine();
  const bool put_out = out() && engine.end().code != Code::invalid_usage;
  if (host_.world().tracing()) {
    host_.world().log(host_.name(), out() ? "is out: " + engine.end().reason : "is through");
  }
  const bool well = !out();
  if (well) engine.leave("", host_.world().now());
  host_.program_is_over(well);
  if (put_out) host_.world().came_back_as_newcomer(host_);
}

Task<Error> UserProgram::wait(Thread thread, peer::CallPtr call) {
  peer::Engine& engine = host_.engine();
  engine.threads().waits(thread, call, host_.world().now());
  host_.settle();
  // A named object: gcc 12 destroys awaited temporaries with captures twice.
  Host::Until ready = host_.until([call] { return call->done.load(); });
  co_await ready;
  engine.threads().continues(thread);
  see(call->record);
  co_return call->error;
}

Task<> UserProgram::compute(Thread thread, Duration most) {
  host_.engine().threads().outside(thread);
  World& world = host_.world();
  const Duration time = world.random.duration(Duration(0), most);
  // Members at even places announce their next call, too early for some of the others.
  if (host_.node() % 2 == 0 && !out()) {
    host_.engine().expect_operation(world.now() + time / 2, {}, world.now());
    if (host_.engine().measuring().primer().active())
      world.report.reached.emplace("primed", host_.state());
    host_.settle();
  }
  co_await host_.sleep(time);
  host_.engine().threads().inside(thread);
}

bool UserProgram::replicas() const { return host_.world().options.ranks > 0; }

// A collective inside the replica, as a sharded model has in every step. A rank that waits for a
// lost rank waits for ever, or fails at some time.
Task<> UserProgram::meet(Thread thread) {
  World& world = host_.world();
  if (!replicas() || out()) co_return;
  const std::vector<Host*>& hosts = world.lives[host_.rank_id().life].hosts;
  const std::uint64_t own = ++host_.meetings;
  for (Host* other : hosts) {
    if (other != &host_)
      world.timeline.after(milliseconds(1), [other] { other->run([other] { other->settle(); }); });
  }
  host_.engine().threads().outside(thread);
  const bool told = world.random.chance(0.3);
  const auto gone = [&hosts] {
    return std::any_of(hosts.begin(), hosts.end(),
                       [](const Host* other) { return other->program_over(); });
  };
  const auto met = [&hosts, &world, own] {
    return hosts.size() == world.options.ranks &&
           std::all_of(hosts.begin(), hosts.end(),
                       [own](const Host* other) { return other->meetings >= own; });
  };
  Host::Until over =
      host_.until([this, met, gone, told] { return met() || out() || (told && gone()); });
  co_await over;
  if (met() || out()) {
    host_.engine().threads().inside(thread);
    co_return;
  }
  host_.engine().leave("a collective of its replica failed", world.now());
  host_.settle();
}

UserProgram::Shape UserProgram::draw_shape(Random& script) const {
  static constexpr DataType kTypes[] = {DataType::int64, DataType::float32, DataType::int32,
                                        DataType::float16, DataType::int8};
  const Options& options = host_.world().options;
  Shape shape;
  shape.position = Random(script).next();
  const std::size_t arrays = script.chance(0.3) ? script.between(2, 4) : 1;
  bool narrow = false;
  for (std::size_t i = 0; i < arrays; ++i) {
    const DataType dtype = kTypes[script.below(5)];
    narrow = narrow || dtype == DataType::float16 || dtype == DataType::int8;
    // Small arrays are the most frequent; some are empty.
    const std::uint64_t limit = script.below(options.max_elements + 1);
    shape.arrays.emplace_back(dtype, script.chance(0.05) ? 0 : script.below(limit + 1));
  }
  if (shape.arrays.size() == 1 && shape.arrays[0].second == 0) shape.arrays[0].second = 1;
  static constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::avg};
  shape.op = kOps[script.below(narrow ? 3 : 4)];
  shape.structure = script.below(3);
  return shape;
}

// Like draw_shape, but sometimes another collective, or quantized.
UserProgram::Shape UserProgram::draw_collective(Random& script) const {
  Shape shape = draw_shape(script);
  if (!script.chance(0.4)) {
    if (!script.chance(0.4)) return shape;
    reduce::Quantization& how = shape.quantization;
    how.code = static_cast<reduce::CodeType>(script.between(1, 3));
    how.zero_exact = script.chance(0.5);
    how.stochastic = script.chance(0.5);
    how.block = reduce::kMinBlock << script.below(3);
    for (auto& array : shape.arrays) array.second *= 4;  // otherwise most would be exact
    shape.feedback = (shape.op == ReduceOp::sum || shape.op == ReduceOp::avg) && script.chance(0.5);
    return shape;
  }
  shape.kind = static_cast<collective::Kind>(script.between(1, collective::kKindCount - 1));
  shape.root = script.next();
  if (!collective::reduces(shape.kind)) shape.op = ReduceOp::sum;
  return shape;
}

ReductionPtr UserProgram::start_reduction(const Shape& shape, std::optional<std::uint64_t> tag,
                                          bool rerun, std::optional<std::int32_t> value) {
  World& world = host_.world();
  auto reduction = std::make_shared<Reduction>();
  reduction->op = shape.op;
  peer::OperationRequest request;
  // The root and the number of parts follow the caller's view, which may be older than the
  // engine's.
  const peer::Record& present = host_.engine().session().record();
  const peer::Record record = view_ ? view_ : present;
  const std::uint64_t members = record == nullptr ? 1 : record->members.size();
  const bool scatters = collective::scatters(shape.kind);
  const bool gathers = collective::gathers(shape.kind);
  const bool parts = gathers || scatters;
  const bool into_given = shape.kind == collective::Kind::all_gather && shape.structure == 0;
  request.kind = shape.kind;
  request.quantization = reduction->quantization = shape.quantization;
  request.root = static_cast<std::uint32_t>(shape.root % members);
  request.parts = parts ? static_cast<std::uint32_t>(members) : 0;
  reduction->kind = request.kind;
  if (record != nullptr) reduction->root = record->members[request.root].id;
  request.op = shape.op;
  request.tag = tag;
  request.view = record;
  request.rerun = reduction->rerun = rerun && !scatters && !into_given;
  reduction->members = parts || present == nullptr ? members : present->members.size();
  reduction->position = shape.position;
  request.alone_is_error = world.options.program == Program::explicit_api;
  request.structure = shape.structure;
  reduction->shape = (shape.structure * 31 + static_cast<std::uint64_t>(shape.op)) * 31 +
                     static_cast<std::uint64_t>(shape.kind);
  const reduce::Quantization& how = shape.quantization;
  reduction->shape = ((reduction->shape * 31 + static_cast<std::uint64_t>(how.code)) * 4 +
                      (how.zero_exact ? 1U : 0U) + (how.stochastic ? 2U : 0U)) *
                         31 +
                     how.block;
  for (const auto& [dtype, count] : shape.arrays) {
    ArrayData array;
    array.dtype = dtype;
    array.count = count;
    array.in_place = world.random.chance(0.4) && !parts;
    const std::int32_t scale =
        shape.op == ReduceOp::avg && (dtype == DataType::float32 || dtype == DataType::float64)
            ? kDivisible
            : 1;
    std::vector<std::int64_t> wide;
    const std::size_t sent = count * (scatters ? members : 1);
    for (std::size_t i = 0; i < sent; ++i) {
      const auto drawn = static_cast<std::int32_t>(world.random.below(25)) - 12;
      array.values.push_back(value ? *value : drawn * scale);
      wide.push_back(array.values.back());
    }
    array.input = to_bytes(dtype, wide);
    array.send = array.input;
    const std::size_t received = count * (gathers ? members : 1) * element_size(dtype);
    if (!array.in_place) array.recv.assign(received, 0xee);
    // Each member decides this for itself.
    const bool floating = dtype == DataType::float32 || dtype == DataType::float16;
    if (shape.feedback && floating && world.random.chance(0.9)) {
      for (std::size_t i = 0; i < count; ++i)
        array.left_before.push_back(static_cast<float>(world.random.below(201)) / 100 - 1);
      array.left_out = array.left_before;
    }
    reduction->shape = reduction->shape * 1000003 + count * 16 + static_cast<std::uint64_t>(dtype);
    request.description += std::to_string(count) + " " + std::string(pccl::name(dtype)) + " ";
    reduction->arrays.push_back(std::move(array));
  }
  return host_.reduce(std::move(reduction), std::move(request));
}

// The simple API's admission point. True: newcomers were admitted since the previous one.
Task<bool> UserProgram::admit(Thread thread) {
  peer::Engine& engine = host_.engine();
  engine.threads().inside(thread);
  while (engine.calls().unfinished() > 0 && !out()) {
    peer::CallPtr open;
    for (const ReductionPtr& reduction : host_.reductions()) {
      if (!reduction->call->done) open = reduction->call;
    }
    if (!open) break;
    (void)co_await wait(thread, open);
  }
  if (engine.standing() != peer::Standing::member) co_await become_member(thread);
  if (out()) co_return false;
  if (engine.admission().fresh()) {
    engine.admission().use_fresh();
    engine.admission().pass_point();
    co_return true;
  }
  if (!engine.admission().round_needed()) {
    engine.admission().pass_point();
    co_return false;
  }
  const std::uint64_t before = engine.session().record()->admission;
  while (!out()) {
    const peer::CallPtr call =
        host_.enter(wire::RoundKind::admit, wire::AdmissionPoint{!replicas()});
    const Error error = co_await wait(thread, call);
    if (out()) co_return false;
    if (error.code == Code::ok && call->answer != 0) {
      const Error measured = co_await wait(thread, host_.enter(wire::RoundKind::optimize));
      if (out() || measured.code == Code::peer_lost) co_return false;
    }
    if (error.code == Code::ok) engine.admission().pass_point();
    // The ranks of a replica stay in step: repeat a failed call at once.
    if (error.code == Code::ok || !replicas()) break;
  }
  co_return !out() && engine.session().record()->admission != before;
}

// Adds the missing entries, each with this probability.
void UserProgram::make_state(double chance) {
  Random& random = host_.world().random;
  const std::uint64_t entries = script_for(0, 6).between(1, 9);
  for (std::uint64_t i = 0; i < entries; ++i) {
    const std::string name = "entry " + std::to_string(i);
    if (state_.contains(name) || (i > 0 && !random.chance(chance))) continue;
    wire::Bytes& bytes = state_[name];
    bytes.resize(script_for(i, 7).below(host_.world().options.max_elements + 1));
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.next());
  }
  state_.try_emplace("step", 8, std::uint8_t{0});
}

// A newcomer's first collective call. Some callers give up and try again.
Task<> UserProgram::become_member(Thread thread) {
  peer::Engine& engine = host_.engine();
  World& world = host_.world();
  const auto in = [this] { return host_.engine().standing() == peer::Standing::member || out(); };
  while (!in()) {
    engine.admission().request();
    host_.settle();
    const bool patient = !world.random.chance(0.2);
    const Instant end = world.now() + world.random.duration(Duration(0), seconds(2));
    if (!patient) {
      Host* process = &host_;
      world.timeline.at(end, [process] { process->run([process] { process->settle(); }); });
    }
    Host::Until let_in = host_.until(
        [&world, in, patient, end] { return in() || (!patient && world.now() >= end); });
    co_await let_in;
    if (in()) break;
    engine.withdraw_admission(world.now());
    host_.settle();
    co_await compute(thread, seconds(1));
  }
  see(engine.session().record());
}

// pccl.sync: admits newcomers and makes the state equal.
Task<bool> UserProgram::sync_state(Thread thread) {
  peer::Engine& engine = host_.engine();
  engine.threads().inside(thread);
  if (engine.standing() != peer::Standing::member) co_await become_member(thread);
  if (out()) co_return false;
  if (!engine.admission().owes_sync()) {
    if (engine.admission().round_needed() || engine.session().record()->members.size() == 1) {
      const peer::CallPtr call =
          host_.enter(wire::RoundKind::sync_admit, wire::AdmissionPoint{true});
      const Error error = co_await wait(thread, call);
      if (out() || error.code != Code::ok) co_return false;
      if (call->answer != 0) (void)co_await wait(thread, host_.enter(wire::RoundKind::optimize));
      if (out()) co_return false;
    }
    engine.admission().pass_point();
  }
  const SyncingPtr syncing = host_.sync(state_, synced_ || worked_);
  const Error error = co_await wait(thread, syncing->call);
  if (error.code == Code::ok) synced_ = true;
  // A founder must have all entries of the others: the user adds them.
  if (error.code == Code::mismatched_call) make_state(1.0);
  if (error.code == Code::state_unavailable) state_lost_ = true;
  co_return error.code == Code::ok && !out();
}

// After an admission members do not know the others' steps: all continue with the highest one.
Task<std::optional<std::uint64_t>> UserProgram::agree_on_step(Thread thread, bool rerun) {
  Shape shape;
  shape.arrays = {{DataType::int64, 1}};
  shape.op = ReduceOp::max;
  shape.structure = kSyncStructure;
  const std::optional<std::uint64_t> tag = rerun ? std::nullopt : std::optional<std::uint64_t>(0);
  const ReductionPtr reduction =
      start_reduction(shape, tag, rerun, static_cast<std::int32_t>(step_));
  const Error error = co_await wait(thread, reduction->call);
  if (error.code != Code::ok) co_return std::nullopt;
  co_return static_cast<std::uint64_t>(reduction->result.front());
}

// Several operations in flight, tagged and untagged, awaited in any order.
Task<> UserProgram::burst(Thread thread, Random& script) {
  std::vector<std::pair<Shape, std::optional<std::uint64_t>>> calls;
  const std::uint64_t count = script.between(2, 6);
  for (std::uint64_t i = 0; i < count; ++i) {
    const Shape shape = draw_collective(script);
    const bool tagged = script.chance(0.6);
    calls.emplace_back(shape, tagged ? std::optional<std::uint64_t>(100 + i) : std::nullopt);
  }
  // Untagged calls meet by order; tagged ones may be made in any order.
  Random& random = host_.world().random;
  std::vector<ReductionPtr> running;
  while (!calls.empty()) {
    std::size_t next = random.below(calls.size());
    if (!calls[next].second) {
      next = 0;
      while (calls[next].second) ++next;
    }
    running.push_back(start_reduction(calls[next].first, calls[next].second, true));
    calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(next));
    host_.settle();
    if (random.chance(0.2)) co_await compute(thread, milliseconds(3));
  }
  while (!running.empty()) {
    const std::size_t next = random.below(running.size());
    const peer::CallPtr call = running[next]->call;
    running.erase(running.begin() + static_cast<std::ptrdiff_t>(next));
    (void)co_await wait(thread, call);
  }
}

// One step of a simple-API program: equal on all members, whether its calls succeed or fail.
Task<> UserProgram::script(Thread thread, std::uint64_t step) {
  Random script = script_for(step, 1);
  const std::uint64_t calls = script.between(1, 4);
  for (std::uint64_t i = 0; i < calls && !out(); ++i) {
    switch (script.below(6)) {
      case 0: {
        const auto kind = script.chance(0.5) ? wire::RoundKind::barrier : wire::RoundKind::optimize;
        const peer::CallPtr call = host_.enter(kind);
        (void)co_await wait(thread, call);
        break;
      }
      case 1: {
        const peer::CallPtr call = host_.enter(wire::RoundKind::peers_pending);
        (void)co_await wait(thread, call);
        break;
      }
      case 2:
        co_await burst(thread, script);
        break;
      default: {
        const Shape shape = draw_collective(script);
        const ReductionPtr reduction = start_reduction(shape, std::nullopt, true);
        (void)co_await wait(thread, reduction->call);
        break;
      }
    }
  }
}

// One member's call differs from the others'.
Task<> UserProgram::disagree(Thread thread, std::uint64_t step) {
  Random script = script_for(step, 2);
  Shape shape = draw_shape(script);
  const std::uint64_t world = host_.engine().session().record()->members.size();
  const std::uint64_t odd = script.below(world);
  const std::uint64_t how = script.below(3);
  if (own_rank() == odd && world > 1) {
    if (how == 0) shape.arrays.front().second += 1 + script.below(20);
    if (how == 1) shape.op = shape.op == ReduceOp::sum ? ReduceOp::max : ReduceOp::sum;
    if (how == 2) shape.structure += 1000;
  }
  const ReductionPtr reduction = start_reduction(shape, std::nullopt, true);
  (void)co_await wait(thread, reduction->call);
}

// Some members wait in a barrier while the others wait in an all-reduce, and then the reverse, so
// that all have made the same calls.
Task<> UserProgram::get_stuck(Thread thread, std::uint64_t step) {
  Random script = script_for(step, 3);
  const Shape shape = draw_shape(script);
  const std::uint64_t world = host_.engine().session().record()->members.size();
  const bool barrier_first = own_rank() == script.below(world);
  for (int turn = 0; turn < 2 && !out(); ++turn) {
    if ((turn == 0) == barrier_first) {
      const peer::CallPtr call = host_.enter(wire::RoundKind::barrier);
      (void)co_await wait(thread, call);
    } else {
      const ReductionPtr reduction = start_reduction(shape, std::nullopt, true);
      (void)co_await wait(thread, reduction->call);
    }
  }
}

}  // namespace pccl::simulation
