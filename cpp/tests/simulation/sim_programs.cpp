// The programs of users: the loops of the explicit API and the simple API as people write them.
#include "tests/simulation/sim_world.h"

namespace pccl::simulation {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr std::uint64_t kMain = 1;
constexpr std::uint64_t kReduce = 2;

// Advances the state by one step, equally on all members.
void advance(UserState& state, std::uint64_t step) {
  state["step"] = wire::Bytes(8, static_cast<std::uint8_t>(step));
  for (auto& [name, bytes] : state) {
    if (name == "step") continue;
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<std::uint8_t>(bytes[i] * 5 + i + step + 1);
  }
}

}  // namespace

void UserProgram::start() {
  switch (host_.world().options.program) {
    case Program::explicit_api:
      tasks_.push_back(explicit_api());
      break;
    case Program::sync:
      tasks_.push_back(sync_loop());
      break;
    case Program::threads:
      tasks_.push_back(threads_main());
      tasks_.push_back(threads_reduce());
      break;
    default:
      tasks_.push_back(simple_api());
      break;
  }
  for (Task<>& task : tasks_) task.start();
}

Task<> UserProgram::simple_api() {
  World& world = host_.world();
  peer::Engine& engine = host_.engine();
  Host::Until connected =
      host_.until([&engine] { return engine.standing() != peer::Standing::joining; });
  co_await connected;
  see(engine.session().record());
  engine.threads().inside(kMain);
  // A slow start must not stall others.
  co_await compute(kMain, world.random.chance(0.3) ? seconds(2) : milliseconds(1));
  while (step_ < world.options.steps && !out()) {
    const bool added = co_await admit(kMain);
    if (out()) break;
    if (added) aligned_ = false;
    if (!aligned_) {
      std::optional<std::uint64_t> step = co_await agree_on_step(kMain, true);
      while (!step && replicas() && !out()) step = co_await agree_on_step(kMain, true);
      if (!step) continue;
      step_ = *step;
      aligned_ = true;
      if (step_ >= world.options.steps) break;
    }
    co_await script(kMain, step_);
    if (!out() && world.options.program == Program::mismatch) co_await disagree(kMain, step_);
    if (!out() && world.options.program == Program::stuck && step_ % 2 == 1) {
      co_await get_stuck(kMain, step_);
    }
    ++step_;
    co_await compute(kMain, world.think);
    co_await meet(kMain);
  }
  engine.threads().ended(kMain);
  end();
}

// A training loop whose state contains its step.
Task<> UserProgram::sync_loop() {
  World& world = host_.world();
  peer::Engine& engine = host_.engine();
  Random own(world.random.next());
  make_state(host_.node() > world.options.peers ? 0.8 : 1.0);  // newcomers may lack entries
  Host::Until connected =
      host_.until([&engine] { return engine.standing() != peer::Standing::joining; });
  co_await connected;
  see(engine.session().record());
  engine.threads().inside(kMain);
  const bool founder =
      engine.session().record() != nullptr && engine.session().record()->admission == 1;
  co_await compute(kMain, world.random.chance(0.3) ? seconds(2) : milliseconds(1));
  Random first = script_for(0, 8);
  if (founder && !out() && first.chance(0.4)) {
    // Peers that join later must not overwrite the founders' state.
    const Shape shape = draw_shape(first);
    const ReductionPtr reduction = start_reduction(shape, std::nullopt, true);
    const Error error = co_await wait(kMain, reduction->call);
    worked_ = error.code == Code::ok;
  }
  while (step_ < world.options.steps && !out()) {
    const bool synced = co_await sync_state(kMain);
    if (out() || state_lost_) break;
    if (!synced) continue;
    step_ = state_.at("step").front();
    if (step_ >= world.options.steps) break;
    co_await script(kMain, step_);
    ++step_;
    advance(state_, step_);
    // Sometimes a bug of the user: this member's state diverges.
    if (world.options.program == Program::sync && own.chance(0.05)) state_.at("step").back() ^= 8;
    co_await compute(kMain, world.think);
    co_await meet(kMain);
  }
  engine.threads().ended(kMain);
  end();
}

Task<bool> UserProgram::update_topology(Thread thread) {
  peer::Engine& engine = host_.engine();
  engine.threads().inside(thread);
  if (engine.admission().fresh()) {
    engine.admission().use_fresh();
    aligned_ = false;
    co_return true;
  }
  const std::uint64_t before = engine.session().record()->admission;
  const peer::CallPtr call = host_.enter(wire::RoundKind::admit);
  const Error error = co_await wait(thread, call);
  if (out()) co_return false;
  if (engine.session().record()->admission != before) aligned_ = false;
  co_return error.code == Code::ok;
}

Task<> UserProgram::explicit_api() {
  World& world = host_.world();
  peer::Engine& engine = host_.engine();
  Host::Until member =
      host_.until([this, &engine] { return engine.standing() == peer::Standing::member || out(); });
  co_await member;
  see(engine.session().record());
  int alone = 0;
  while (step_ < world.options.steps && !out()) {
    const bool updated = co_await update_topology(kMain);
    if (out()) break;
    if (!updated) continue;
    if (engine.session().record()->members.size() == 1) {
      // Alone: the user waits a while for other peers.
      if (++alone > 3) ++step_;
      co_await compute(kMain, milliseconds(200));
      co_await meet(kMain);
      aligned_ = false;
      if (step_ >= world.options.steps) break;
      continue;
    }
    if (!aligned_) {
      std::optional<std::uint64_t> step = co_await agree_on_step(kMain, false);
      // A call that fails in one group may succeed in others: do not pass an extra admission point.
      while (!step && replicas() && !out() && engine.session().record()->members.size() > 1)
        step = co_await agree_on_step(kMain, false);
      if (!step) co_await meet(kMain);
      if (!step) continue;
      step_ = *step;
      aligned_ = true;
      if (step_ >= world.options.steps) break;
    }
    Random script = script_for(step_, 4);
    if (script.chance(0.4)) {
      const peer::CallPtr call = host_.enter(wire::RoundKind::optimize);
      (void)co_await wait(kMain, call);
      if (out()) break;
    }
    const std::uint64_t count = script.between(1, 3);
    std::vector<ReductionPtr> running;
    for (std::uint64_t i = 0; i < count; ++i) {
      running.push_back(start_reduction(draw_collective(script), i, false));
      host_.settle();
    }
    bool all = true;
    for (const ReductionPtr& reduction : running) {
      const Error error = co_await wait(kMain, reduction->call);
      all = all && error.code == Code::ok;
    }
    if (all) ++step_;
    co_await compute(kMain, world.think);
    co_await meet(kMain);
  }
  engine.threads().ended(kMain);
  end();
}

// The main thread computes and passes gradients to the reduce thread.
Task<> UserProgram::threads_main() {
  World& world = host_.world();
  peer::Engine& engine = host_.engine();
  Host::Until started =
      host_.until([&engine] { return engine.standing() != peer::Standing::joining; });
  co_await started;
  see(engine.session().record());
  engine.threads().inside(kMain);
  while (step_ < world.options.steps && !out()) {
    const bool added = co_await admit(kMain);
    if (out()) break;
    if (added) aligned_ = false;
    if (!aligned_) {
      const std::optional<std::uint64_t> step = co_await agree_on_step(kMain, true);
      if (!step) continue;
      step_ = *step;
      aligned_ = true;
      if (step_ >= world.options.steps) break;
    }
    Random script = script_for(step_, 5);
    const std::uint64_t count = script.between(1, 5);
    for (std::uint64_t i = 0; i < count && !out(); ++i) {
      jobs_.emplace_back(draw_shape(script), i);
      // Sometimes a member computes for longer than all grace periods of the deadlock rule.
      const bool long_one = world.random.chance(0.1);
      co_await compute(kMain, long_one ? seconds(16) : milliseconds(50));
    }
    if (script.chance(0.3) && !out()) {
      const peer::CallPtr call = host_.enter(wire::RoundKind::barrier);
      (void)co_await wait(kMain, call);
    }
    // Waits for the other thread outside of the engine.
    engine.threads().outside(kMain);
    Host::Until reduced = host_.until([this] { return (jobs_.empty() && !busy_) || out(); });
    co_await reduced;
    engine.threads().inside(kMain);
    ++step_;
  }
  closing_ = true;
  engine.threads().ended(kMain);
  Host::Until idle = host_.until([this] { return !busy_; });
  co_await idle;
  end();
}

Task<> UserProgram::threads_reduce() {
  peer::Engine& engine = host_.engine();
  while (true) {
    Host::Until work = host_.until([this] { return !jobs_.empty() || closing_; });
    co_await work;
    if (jobs_.empty() || out()) break;
    const auto [shape, tag] = jobs_.front();
    busy_ = true;
    jobs_.pop_front();
    engine.threads().inside(kReduce);
    const ReductionPtr reduction = start_reduction(shape, 1000 + tag, true);
    (void)co_await wait(kReduce, reduction->call);
    engine.threads().outside(kReduce);
    busy_ = false;
  }
  engine.threads().ended(kReduce);
}

}  // namespace pccl::simulation
