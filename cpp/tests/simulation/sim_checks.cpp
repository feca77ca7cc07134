// The invariants of DESIGN section 4, as a simulated run can see them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "tests/simulation/sim_world.h"

namespace pccl::simulation {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

// With nothing disturbed any more, every call ends within this.
constexpr Duration kCallLimit = seconds(90);
// And every program within this.
constexpr Duration kProgramLimit = seconds(900);
constexpr std::size_t kKeptBuffers = 12;
constexpr std::uint8_t kScribble = 0xa5;
constexpr float kScribbled = -12345;

bool contains(const std::vector<PeerId>& members, const PeerId& id) {
  return std::find(members.begin(), members.end(), id) != members.end();
}

std::vector<PeerId> ids(const peer::Record& record) {
  std::vector<PeerId> ids;
  if (record) {
    for (const wire::Member& member : record->members) ids.push_back(member.id);
  }
  return ids;
}

std::string code_name(Code code) { return "code " + std::to_string(static_cast<int>(code)); }

std::int64_t combine(ReduceOp op, std::int64_t a, std::int64_t b) {
  switch (op) {
    case ReduceOp::max:
      return std::max(a, b);
    case ReduceOp::min:
      return std::min(a, b);
    case ReduceOp::prod:
      return a * b;
    default:
      return a + b;
  }
}

// A master's surroundings when nobody listens.
class Nobody final : public master::Surroundings {
 public:
  void send(master::ConnectionId, std::uint64_t, const wire::Message&) override {}
  void close(master::ConnectionId) override {}
  void log(std::string) override {}
  wire::Census census() override { return {}; }
  std::uint64_t next_join_ordinal() override { return 0; }
};

}  // namespace

void Checks::fail(const std::string& invariant, const std::string& what) {
  if (failed()) return;
  violation_ = invariant + " broken in seed " + std::to_string(world_.seed()) + " at event " +
               std::to_string(world_.timeline.events()) + ": " + what;
  world_.log("checks", violation_);
}

// ---- what happened -----------------------------------------------------------------------------

void Checks::started(const Host& host, const Reduction& reduction) {
  const auto* key = std::get_if<wire::OpKey>(&reduction.call->key);
  if (key == nullptr || key->admission == 0) return;  // it never began
  Contribution contribution;
  contribution.shape = reduction.shape;
  contribution.place = reduction.place;
  contribution.op = reduction.op;
  for (const ArrayData& array : reduction.arrays) {
    contribution.arrays.emplace_back(array.dtype, array.values);
    contribution.left_before.push_back(array.left_before);
  }
  if (world_.bug_due(Bug::commit_alone))
    ++contribution.shape;  // as if it had been called differently
  if (world_.bug_due(Bug::skip_call)) ++contribution.place;
  contributions_[{reduction.run, *key}][host.engine().id()] = std::move(contribution);
}

void Checks::after_event(Host& host) {
  if (failed()) return;
  if (!disagreements_.empty()) settle_disagreements();
  const peer::Engine& engine = host.engine();
  if (engine.standing() == peer::Standing::out && engine.end().code == Code::internal_error)
    return fail("I1", host.name() + " failed by itself: " + engine.end().reason);
  for (auto it = host.reductions_.begin(); it != host.reductions_.end() && !failed();) {
    Reduction& reduction = **it;
    if (!reduction.call) {
      ++it;
      continue;
    }
    if (!reduction.call->done) {
      inputs_survive(host, reduction);
    } else if (!reduction.ended) {
      ended(host, reduction);
    } else if (host.reductions_.size() > kKeptBuffers) {
      left_alone(host, reduction);
      it = host.reductions_.erase(it);
      continue;
    }
    ++it;
  }
  if (host.syncing_ && host.syncing_->call && !failed()) {
    Syncing& syncing = *host.syncing_;
    if (!syncing.call->done) {
      if (*syncing.live != syncing.before)
        fail("I3", "the state of " + host.name() + " was written before the end of its sync");
    } else if (!syncing.ended) {
      ended(host, syncing);
    }
  }
  for (auto it = host.rounds_.begin(); it != host.rounds_.end() && !failed();) {
    if (!it->call->done) {
      ++it;
      continue;
    }
    ended(host, *it);
    it = host.rounds_.erase(it);
  }
}

void Checks::ended(Host& host, Reduction& reduction) {
  reduction.ended = true;
  const peer::Call& call = *reduction.call;
  const bool commit = call.error.code == Code::ok;
  ++(commit ? world_.report.commits : world_.report.aborts);
  world_.report.reruns += call.attempts > 1 ? call.attempts - 1 : 0;
  if (call.error.code == Code::deadlock) ++world_.report.deadlocks;
  if (call.error.code == Code::mismatched_call) ++world_.report.mismatches;
  const std::string what = wire::describe(call.key);
  if (world_.tracing()) {
    world_.log(host.name(), what + (commit ? " is committed" : " fails: " + call.error.reason));
  }
  no_false_alarm(host, what, call.error.code);
  if (!commit) inputs_survive(host, reduction);
  const auto* key = std::get_if<wire::OpKey>(&call.key);
  if (key != nullptr && key->admission != 0) {
    const OpId id{reduction.run, *key};
    if (commit) {
      // The results of those that are left take the first part of a gather's arrays.
      const std::size_t left = call.record->members.size();
      for (ArrayData& array : reduction.arrays) {
        if (reduction.kind == collective::Kind::all_gather && left < reduction.members)
          array.recv.resize(array.count * left * element_size(array.dtype));
      }
      if (world_.bug_due(Bug::flip_result)) {
        ArrayData& array = reduction.arrays.back();
        wire::Bytes& bytes = array.in_place ? array.send : array.recv;
        if (!bytes.empty()) bytes.back() ^= 1;
      }
      if (!reduction.rerun && call.record->members.size() != reduction.members)
        return fail("I1", what + " is committed on " + host.name() + " in spite of a loss");
      mismatch_is_for_all(host, id, reduction);
      same_place(host, id, reduction);
      right_result(host, id, reduction);
      if (reduction.quantization) nothing_lost(host, id, reduction);
    }
    // A peer that is out does not know the verdict; what it was told before stands.
    if (commit || host.engine().standing() != peer::Standing::out) {
      Ending ending{host.engine().id(), host.name(), call.error.code, 0,
                    ids(call.record),   0,           call.error.peer, {}};
      ending.epoch = call.record ? call.record->epoch : 0;
      if (commit) {
        // Of a reduce-scatter each has its own part.
        if (reduction.kind != collective::Kind::reduce_scatter) {
          for (const ArrayData& array : reduction.arrays) ending.bytes.push_back(array.result());
        }
      }
      std::vector<Ending>& endings = operations_[id];
      one_verdict(what, endings, ending);
      if (commit) bit_parity(what, endings, ending);
      endings.push_back(std::move(ending));
    }
  }
  if (commit && !reduction.arrays.empty() && reduction.arrays.front().dtype == DataType::int64) {
    const wire::Bytes& bytes = reduction.arrays.front().result();
    reduction.result.resize(bytes.size() / sizeof(std::int64_t));
    if (!bytes.empty()) std::memcpy(reduction.result.data(), bytes.data(), bytes.size());
  }
  // The user does other things with the memory now: neither must the engine write it, nor send from
  // it.
  for (ArrayData& array : reduction.arrays) {
    std::fill(array.send.begin(), array.send.end(), kScribble);
    std::fill(array.recv.begin(), array.recv.end(), kScribble);
    std::fill(array.left_out.begin(), array.left_out.end(), kScribbled);
  }
}

void Checks::ended(Host& host, const RoundEntry& round) {
  const peer::Call& call = *round.call;
  if (call.error.code == Code::deadlock) ++world_.report.deadlocks;
  const std::string what = wire::describe(call.key);
  if (world_.tracing()) {
    world_.log(host.name(),
               what + (call.error.code == Code::ok ? " is over" : " fails: ") + call.error.reason);
  }
  no_false_alarm(host, what, call.error.code);
  const auto* key = std::get_if<wire::RoundKey>(&call.key);
  if (key == nullptr || key->admission == 0) return;
  const bool commit = call.error.code == Code::ok;
  if (!commit && host.engine().standing() == peer::Standing::out) return;
  Ending ending{host.engine().id(), host.name(), call.error.code, 0,
                ids(call.record),   call.answer, call.error.peer, {}};
  ending.epoch = call.record ? call.record->epoch : 0;
  std::vector<Ending>& endings = rounds_[{round.run, *key}];
  one_verdict(what, endings, ending);
  if (commit && (key->kind == wire::RoundKind::admit || key->kind == wire::RoundKind::sync_admit))
    same_replicas(call.record);
  endings.push_back(std::move(ending));
}

void Checks::brings(const Syncing& syncing) {
  if (syncing.standing) standing_states_[syncing.run].insert(syncing.before);
}

void Checks::ended(Host& host, Syncing& syncing) {
  syncing.ended = true;
  const peer::Call& call = *syncing.call;
  const bool commit = call.error.code == Code::ok;
  const std::string what = wire::describe(call.key);
  if (world_.tracing()) {
    world_.log(host.name(), what + (commit ? " is done at revision " +
                                                 std::to_string(call.update->decision.revision)
                                           : " fails: " + call.error.reason));
  }
  no_false_alarm(host, what, call.error.code);
  UserState& live = *syncing.live;
  if (live != syncing.before)
    return fail("I3", "the state of " + host.name() + " was written in a sync");
  const auto* key = std::get_if<wire::RoundKey>(&call.key);
  if (key == nullptr || key->admission == 0) return;
  if (!commit) {
    ++world_.report.sync_failures;
    if (host.engine().standing() == peer::Standing::out) return;
  } else {
    ++world_.report.syncs;
    world_.report.sync_bytes += call.update->rx_bytes;
    for (const state::Update::Copy& copy : call.update->copies)
      std::memcpy(copy.to, copy.from, copy.bytes);
    for (const state::Update::Replacement& replacement : call.update->replacements) {
      const std::uint8_t* bytes = replacement.bytes.data();
      live[replacement.what.name].assign(bytes, bytes + replacement.what.bytes);
    }
    if (world_.bug_due(Bug::stale_state) && !call.update->copies.empty()) live = syncing.before;
    never_a_newcomers(host, syncing);
  }
  Ending ending{host.engine().id(), host.name(), call.error.code, 0,
                ids(call.record),   0,           call.error.peer, {}};
  ending.epoch = call.record ? call.record->epoch : 0;
  if (commit) {
    ending.answer = call.update->decision.revision;
    for (const auto& [name, bytes] : live) {
      ending.bytes.emplace_back(name.begin(), name.end());
      ending.bytes.push_back(bytes);
    }
  }
  std::vector<Ending>& endings = rounds_[{syncing.run, *key}];
  one_verdict(what, endings, ending);
  if (commit) bit_parity(what, endings, ending);
  endings.push_back(std::move(ending));
}

// ---- I8: a newcomer's state never counts
// -----------------------------------------------------------------------

void Checks::never_a_newcomers(const Host& host, const Syncing& syncing) {
  if (!syncing.standing) return;
  // This member was in a sync before; so whatever it holds now, such a member has brought.
  if (standing_states_[syncing.run].contains(*syncing.live)) return;
  fail("I8", host.name() + " was given a state that no standing member had");
}

// ---- I1: one verdict ---------------------------------------------------------------------------

// Two peers that are both members of the epochs in which they learnt it know of the same verdict,
// for the same members. A peer that a restarted master could not wait for may know of another one,
// as long as it never becomes a member again.
void Checks::one_verdict(const std::string& what, const std::vector<Ending>& before,
                         const Ending& now) {
  for (const Ending& other : before) {
    if (!contains(other.members, now.peer) || !contains(now.members, other.peer)) continue;
    if (other.code != now.code || (now.code == Code::ok && other.answer != now.answer)) {
      disagreements_.push_back({other.peer, now.peer,
                                what + " ended with " + code_name(other.code) + " on " +
                                    other.host + " and with " + code_name(now.code) + " on " +
                                    now.host});
    } else if (other.culprit != now.culprit) {
      disagreements_.push_back({other.peer, now.peer,
                                what + " failed for peer " + other.culprit.brief() + " on " +
                                    other.host + " and for peer " + now.culprit.brief() + " on " +
                                    now.host});
    } else if (other.members != now.members) {
      disagreements_.push_back(
          {other.peer, now.peer,
           what + " was decided for different members on " + other.host + " and " + now.host});
    }
  }
  settle_disagreements();
}

// Those who disagree may not both belong to the run: follow the same master.
void Checks::settle_disagreements() {
  std::erase_if(disagreements_, [&](const Disagreement& found) {
    const Host* const one = world_.host_of(found.one);
    const Host* const other = world_.host_of(found.other);
    for (const Host* host : {one, other}) {
      if (!host->alive() || host->engine().standing() == peer::Standing::out) return true;
    }
    const peer::Session& a = one->engine().session();
    const peer::Session& b = other->engine().session();
    if (a.welcomed() && b.welcomed() && a.term() == b.term() && a.run() == b.run()) {
      fail("I1", found.what);
    }
    return false;
  });
}

// ---- I2: equal and right -----------------------------------------------------------------------

void Checks::bit_parity(const std::string& what, const std::vector<Ending>& before,
                        const Ending& now) {
  for (const Ending& other : before) {
    if (other.code != Code::ok || !contains(other.members, now.peer) ||
        !contains(now.members, other.peer)) {
      continue;
    }
    if (other.bytes != now.bytes) {
      fail("I2", what + " has different bytes on " + other.host + " and " + now.host);
    }
  }
}

// Rounded twice, on the way in and on the way out, and once more by regions, by a step each time;
// and up to 1 of each member may come with it that was left out before.
bool Checks::near(const Reduction& reduction, const ArrayData& array,
                  const std::vector<std::int64_t>& expected, std::size_t members, bool feedback) {
  const double largest = array.dtype == DataType::float32 && reduction.op == ReduceOp::avg
                             ? 2520.0 * 12
                             : 12.0;  // see start_reduction
  double step = 2 * largest / 254;
  if (reduction.quantization.code == reduce::CodeType::bits4) step = 2 * largest / 14;
  if (reduction.quantization.code == reduce::CodeType::float8) step = largest / 8;
  if (array.dtype == DataType::float16) step += largest / 1024;
  const double times = ran_by_regions(reduction) ? 3.01 : 2.01;
  const double most = (times * step + (feedback ? 1 : 0)) *
                      (reduction.op == ReduceOp::sum ? static_cast<double>(members) : 1.0);
  const std::vector<double> got = to_numbers(array.dtype, array.result());
  if (got.size() != expected.size()) return false;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double off = got[i] - static_cast<double>(expected[i]);
    if (!(std::abs(off) <= most)) return false;
  }
  return true;
}

bool Checks::ran_by_regions(const Reduction& reduction) {
  std::uint64_t bytes = 0;
  bool widens = false;
  for (const ArrayData& array : reduction.arrays) {
    const std::size_t element = element_size(array.dtype);
    bytes += array.count * element;
    widens = widens || accumulation_size(array.dtype, reduction.op) > element;
  }
  const wire::SizeClass& size = topology::size_class(reduction.call->record->plan, bytes, widens,
                                                     static_cast<bool>(reduction.quantization));
  return size.kind == wire::ScheduleKind::regional;
}

void Checks::right_result(const Host& host, const OpId& id, const Reduction& reduction) {
  const auto& contributions = contributions_[id];
  const std::vector<PeerId> members = ids(reduction.call->record);
  std::vector<const Contribution*> inputs;
  for (const PeerId& member : members) {
    const auto it = contributions.find(member);
    if (it == contributions.end()) {
      return fail("I2", wire::describe(id.second) + " is committed on " + host.name() +
                            " for a member that never called it: " + member.brief());
    }
    inputs.push_back(&it->second);
  }
  using collective::Kind;
  const Kind kind = reduction.kind;
  const auto rank = static_cast<std::size_t>(
      std::find(members.begin(), members.end(), host.engine().id()) - members.begin());
  if (kind == Kind::all_reduce && ran_by_regions(reduction))
    world_.report.reached.emplace("result by regions", host.state());
  for (std::size_t a = 0; a < reduction.arrays.size(); ++a) {
    const ArrayData& array = reduction.arrays[a];
    std::vector<std::int64_t> expected;
    const auto input = [&](std::size_t member) -> const std::vector<std::int32_t>& {
      return inputs[member]->arrays[a].second;
    };
    if (kind == Kind::broadcast) {
      const auto root = std::find(members.begin(), members.end(), reduction.root);
      if (root == members.end())
        return fail("I2", wire::describe(id.second) + " is committed without its root");
      const auto& values = input(static_cast<std::size_t>(root - members.begin()));
      expected.assign(values.begin(), values.end());
    }
    for (std::size_t m = 0; m < inputs.size() && kind == Kind::all_gather; ++m)
      expected.insert(expected.end(), input(m).begin(), input(m).end());
    const std::size_t first = kind == Kind::reduce_scatter ? rank * array.count : 0;
    for (std::size_t i = first; i < first + array.count && collective::reduces(kind); ++i) {
      std::int64_t value = input(0)[i];
      for (std::size_t m = 1; m < inputs.size(); ++m)
        value = combine(reduction.op, value, input(m)[i]);
      if (reduction.op == ReduceOp::avg) value /= static_cast<std::int64_t>(inputs.size());
      expected.push_back(value);
    }
    const bool floating = array.dtype == DataType::float32 || array.dtype == DataType::float16;
    const bool feedback = std::any_of(inputs.begin(), inputs.end(), [a](const Contribution* one) {
      return !one->left_before[a].empty();
    });
    const bool right = reduction.quantization && floating
                           ? near(reduction, array, expected, inputs.size(), feedback)
                           : to_bytes(array.dtype, expected) == array.result();
    if (!right) {
      return fail("I2", wire::describe(id.second) + " has a wrong result on " + host.name() +
                            ", array " + std::to_string(a));
    }
  }
}

// Where all members keep what rounding leaves out, nothing is lost: what went in is in the result,
// or kept by one of them. Known once all of them are through.
void Checks::nothing_lost(const Host& host, const OpId& id, const Reduction& reduction) {
  auto& contributions = contributions_[id];
  auto& own = contributions[host.engine().id()].left_out;
  for (const ArrayData& array : reduction.arrays) {
    own.push_back(array.left_out);
    if (!own.back().empty() && world_.bug_due(Bug::lose_left_out)) own.back().back() += 2;
  }
  const std::vector<PeerId> members = ids(reduction.call->record);
  for (const PeerId& member : members)
    if (contributions[member].left_out.size() != reduction.arrays.size()) return;
  const auto n = static_cast<double>(members.size());
  for (std::size_t a = 0; a < reduction.arrays.size(); ++a) {
    const ArrayData& array = reduction.arrays[a];
    const bool all = std::none_of(members.begin(), members.end(), [&](const PeerId& member) {
      return contributions[member].left_before[a].empty();
    });
    if (!all) continue;
    const bool narrow = array.dtype == DataType::float16;
    const bool mean = reduction.op == ReduceOp::avg;
    const double largest = mean && !narrow ? 2520.0 * 12 : 12.0;  // see start_reduction
    const double accuracy = narrow ? 2e-3 : 1e-5;
    const std::vector<double> got = to_numbers(array.dtype, array.result());
    for (std::size_t i = 0; i < array.count; ++i) {
      double missing = -got[i] * (mean ? n : 1.0);
      for (const PeerId& member : members) {
        const Contribution& one = contributions[member];
        missing += one.arrays[a].second[i] + double{one.left_before[a][i]} - one.left_out[a][i];
      }
      if (std::abs(missing) > accuracy * largest * n) {
        return fail("I3", wire::describe(id.second) + " lost " + std::to_string(missing) +
                              " of element " + std::to_string(i) + " of array " +
                              std::to_string(a));
      }
    }
    world_.report.reached.emplace("nothing left out is lost", host.state());
  }
}

// ---- I3: inputs survive ------------------------------------------------------------------------

// Until the commit the input is what it was; after any other end it stays so.
void Checks::inputs_survive(const Host& host, const Reduction& reduction) {
  for (const ArrayData& array : reduction.arrays) {
    if (array.send == array.input && array.left_out == array.left_before) continue;
    return fail("I3", "the input of " + wire::describe(reduction.call->key) + " on " + host.name() +
                          (reduction.call->done ? " is not what it was after the failure"
                                                : " was written before the commit"));
  }
}

// The engine has let go of the memory of a call that is over.
void Checks::left_alone(const Host& host, const Reduction& reduction) {
  for (const ArrayData& array : reduction.arrays) {
    for (const wire::Bytes* bytes : {&array.send, &array.recv}) {
      if (std::all_of(bytes->begin(), bytes->end(),
                      [](std::uint8_t byte) { return byte == kScribble; })) {
        continue;
      }
      return fail("I3", "memory of " + wire::describe(reduction.call->key) + " on " + host.name() +
                            " was written after the call was over");
    }
    if (std::any_of(array.left_out.begin(), array.left_out.end(),
                    [](float value) { return value != kScribbled; }))
      return fail("I3", "what " + wire::describe(reduction.call->key) + " on " + host.name() +
                            " had left out was written after the call was over");
  }
}

// ---- I4: no hang, no false alarm ---------------------------------------------------------------

void Checks::no_hang() {
  const Instant now = world_.now();
  if (now - world_.calm_since() > kProgramLimit) {
    for (const auto& host : world_.hosts) {
      if (host->program_over()) continue;
      return fail("I4",
                  "the program of " + host->name() + " does not come to its end: " + host->state());
    }
  }
  for (const auto& host : world_.hosts) {
    if (!host->alive() || host->frozen()) continue;
    const auto late = [&](Instant since) {
      return now - std::max(since, world_.calm_since()) > kCallLimit;
    };
    for (const ReductionPtr& reduction : host->reductions()) {
      if (!reduction->call->done && late(reduction->since)) {
        return fail("I4", host->name() + " hangs in " + wire::describe(reduction->call->key));
      }
    }
    if (host->syncing() && !host->syncing()->call->done && late(host->syncing()->since)) {
      return fail("I4", host->name() + " hangs in a " + host->state());
    }
    for (const RoundEntry& round : host->rounds()) {
      if (!round.call->done && late(round.since)) {
        return fail("I4", host->name() + " hangs in " + wire::describe(round.call->key));
      }
    }
  }
}

// Members whose calls can meet are never told that they are stuck; those that are, are told soon.
void Checks::no_false_alarm(const Host& host, const std::string& what, Code code) {
  if (code != Code::deadlock) return;
  if (world_.options.program != Program::stuck) {
    return fail("I4", what + " on " + host.name() + " ended as stuck, and nobody was");
  }
  if (world_.report.faults > 0) return;
  Instant latest{};
  for (const auto& other : world_.hosts) {
    Instant own{};
    for (const ReductionPtr& reduction : other->reductions()) own = std::max(own, reduction->since);
    for (const RoundEntry& round : other->rounds()) own = std::max(own, round.since);
    latest = std::max(latest, own);
  }
  // A second blocked, and again a second if a new plan has had the operations start over.
  const auto& record = host.engine().record();
  const bool planned = record != nullptr && record->cause == wire::Cause::plan;
  if (world_.now() - latest > milliseconds(planned ? 3600 : 2600)) {
    fail("I4", what + " on " + host.name() + " was told only late that everybody was stuck");
  }
}

// ---- I5: no silent wrong answer ----------------------------------------------------------------

void Checks::mismatch_is_for_all(const Host& host, const OpId& id, const Reduction& reduction) {
  const auto& contributions = contributions_[id];
  for (const PeerId& member : ids(reduction.call->record)) {
    const auto it = contributions.find(member);
    if (it == contributions.end() || it->second.shape == reduction.shape) continue;
    return fail("I5", wire::describe(id.second) + " is committed on " + host.name() +
                          " though member " + member.brief() + " called it differently");
  }
}

// A call meets the calls that the others' programs make at the same place: also after calls that
// failed or ran again, some members have not made more calls than others.
void Checks::same_place(const Host& host, const OpId& id, const Reduction& reduction) {
  const auto& contributions = contributions_[id];
  for (const PeerId& member : ids(reduction.call->record)) {
    const auto it = contributions.find(member);
    if (it == contributions.end() || it->second.place == reduction.place) continue;
    return fail("I5", wire::describe(id.second) + " of " + host.name() +
                          " met another call of member " + member.brief());
  }
}

// ---- I7: the master can be rebuilt -------------------------------------------------------------

// At a moment when nothing is under way between the members and the master: a master made from
// their reports alone stands where this one does.
void Checks::rebuild_now() {
  const std::uint32_t of =
      static_cast<std::uint32_t>(world_.random.below(std::max(1U, world_.options.ranks)));
  const master::Group* group = world_.master.group(of);
  if (failed() || group == nullptr || group->record().members.empty() || !world_.master.quiet()) {
    return;
  }
  std::vector<master::Returned> reports;
  std::vector<const peer::Engine*> returned;  // by connection, from 1
  for (const wire::Member& member : group->record().members) {
    Host* host = world_.host_of(member.id);
    if (host == nullptr || !host->alive() || host->frozen() || !host->control_quiet()) return;
    const peer::Session& session = host->engine().session();
    if (!session.member() || !session.welcomed()) return;
    reports.emplace_back(reports.size() + 1, session.rejoin());
    returned.push_back(&host->engine());
  }
  // The master waits for no call that its member has finished: it would wait for ever.
  for (const auto& [key, id] : group->calls().entries()) {
    if (world_.host_of(id)->engine().calls().awaits(key)) continue;
    return fail("I4", wire::describe(key) + " is open at the master for " +
                          world_.host_of(id)->name() + ", where it is over");
  }
  // In any order.
  for (std::size_t i = reports.size(); i > 1; --i) {
    std::swap(reports[i - 1], reports[world_.random.below(i)]);
  }
  Nobody nobody;
  const auto session_on = [&](master::ConnectionId connection) -> const peer::Session& {
    return returned[connection - 1]->session();
  };
  std::vector<wire::LogEntry> log;
  for (const wire::LogPart& part : session_on(master::newest(reports).connection()).log_parts())
    log.insert(log.end(), part.entries.begin(), part.entries.end());
  const std::unique_ptr<master::Group> again =
      master::Group::rebuild(of, world_.master_options, nobody, reports, log, world_.now());
  for (const master::Returned& one : reports) {
    const peer::Session& session = session_on(one.connection());
    // (Of requests to end a call, the master has none or has decided them.)
    std::vector<wire::Message> calls = returned[one.connection() - 1]->calls().open_messages();
    std::erase_if(calls, [](const wire::Message& message) {
      return std::holds_alternative<wire::AbortRequest>(message);
    });
    if (!calls.empty() && world_.bug_due(Bug::forget_entry)) continue;
    const wire::Envelope envelope{session.run(), session.term(), session.applied()};
    for (const wire::Message& message : calls)
      again->on_message(one.connection(), {envelope, message}, world_.now());
  }
  ++world_.report.rebuilds;
  wire::EpochRecord record = group->record();
  record.aborted.clear();  // the log has these
  record.departures.clear();
  if (again->record() != record) {
    fail("I7", "a rebuilt master has another record");
  } else if (again->log().last() != group->log().last()) {
    fail("I7", "a rebuilt master has ordinal " + std::to_string(again->log().last()) + ", not " +
                   std::to_string(group->log().last()));
  } else if (again->summary() != group->summary()) {
    fail("I7",
         "a rebuilt master stands at\n" + again->summary() + "\ninstead of\n" + group->summary());
  }
}

// ---- now and then ------------------------------------------------------------------------------

void Checks::every_second() {
  no_hang();
  replicas_are_whole();
}

// ---- replicas
// ---------------------------------------------------------------------------------------------

// After an admission point.
void Checks::same_replicas(const peer::Record& record) {
  if (world_.options.ranks == 0 || record == nullptr) return;
  std::set<std::size_t> lives;
  // A master that finds nobody to bring back counts anew.
  std::uint64_t run = 0;
  for (const wire::Member& member : record->members) {
    const Host* host = world_.host_of(member.id);
    lives.insert(host->place().life);
    if (run == 0 && host->engine().standing() == peer::Standing::member)
      run = host->engine().session().run() + host->engine().session().term();
  }
  if (run != 0) points_[{run, record->points}].insert(std::move(lives));
}

// In the end: groups agreed on who was a member after each point, but for replicas that were lost.
void Checks::replicas_were_the_same() {
  for (const auto& [point, seen] : points_) {
    std::set<std::size_t> any;
    for (const auto& lives : seen) any.insert(lives.begin(), lives.end());
    for (const std::size_t life : any) {
      const bool everywhere = std::all_of(seen.begin(), seen.end(),
                                          [&](const auto& lives) { return lives.contains(life); });
      const auto& hosts = world_.lives[life].hosts;
      if (everywhere || hosts.size() < world_.options.ranks) continue;
      if (std::all_of(hosts.begin(), hosts.end(),
                      [](const Host* host) { return host->alive() && host->ended_well(); })) {
        return fail("replicas", world_.lives[life].name + " was a member after admission point " +
                                    std::to_string(point.second) +
                                    " in some groups and not in others, and was not lost");
      }
    }
  }
}

// Some time after a rank was lost none of its replica is a member.
void Checks::replicas_are_whole() {
  if (world_.options.ranks == 0 || failed()) return;
  for (const World::Life& life : world_.lives) {
    for (const Host* lost : life.hosts) {
      if (!lost->program_over() || lost->ended_well()) continue;
      if (world_.now() - std::max(lost->ended_at(), world_.calm_since()) < seconds(40)) continue;
      for (const Host* other : life.hosts) {
        const master::Group* group = world_.master.group(other->group());
        if (group == nullptr || other == lost) continue;
        for (const wire::Member& member : group->record().members) {
          if (member.id == other->engine().id())
            return fail("replicas", other->name() + " is still a member, and " + lost->name() +
                                        " of its replica was lost");
        }
      }
    }
  }
}

void Checks::at_the_end() {
  for (const auto& host : world_.hosts) {
    for (const ReductionPtr& reduction : host->reductions()) {
      if (reduction->call && reduction->call->done && reduction->ended) {
        left_alone(*host, *reduction);
      }
    }
  }
  replicas_were_the_same();
  if (world_.report.faults > 0) return;
  // Undisturbed, members that disagree are all told so, and of the same culprit.
  for (const auto& [id, contributions] : contributions_) {
    std::map<std::uint64_t, std::size_t> votes;
    for (const auto& [peer, contribution] : contributions) ++votes[contribution.shape];
    if (votes.size() < 2) continue;
    for (const Ending& ending : operations_[id]) {
      const auto culprit = contributions.find(ending.culprit);
      if (ending.code != Code::mismatched_call) {
        fail("I5", wire::describe(id.second) + " ended with " + code_name(ending.code) + " on " +
                       ending.host + " though the members disagreed");
      } else if (culprit == contributions.end()) {
        fail("I5", wire::describe(id.second) + " names no culprit on " + ending.host);
      } else if (votes[culprit->second.shape] * 2 > contributions.size()) {
        fail("I5", wire::describe(id.second) + " names one of the majority as the odd one out");
      }
    }
  }
}

}  // namespace pccl::simulation
