// The invariants of docs/internals/architecture.md, checked after every event of a simulated run.
#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/simulation/sim_world.h"

namespace pccl::simulation {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

// After the last fault every call ends within this time.
constexpr Duration kCallLimit = seconds(90);
// Reductions may take this much longer for each of the host's segments, or that many times the
// network's slowness. A window may be one segment, and a slow connection may take 64 bytes at a
// time.
constexpr Duration kSegmentLimit = milliseconds(250);
constexpr int kSegmentPaces = 50;
// After the last fault every program ends within this time.
constexpr Duration kProgramLimit = seconds(900);
constexpr std::size_t kKeptBuffers = 12;
constexpr std::uint8_t kScribble = 0xa5;
constexpr float kScribbled = -12345;

bool contains(const std::vector<PeerId>& members, const PeerId& id) {
  return std::find(members.begin(), members.end(), id) != members.end();
}

std::string code_name(Code code) { return "code " + std::to_string(static_cast<int>(code)); }

}  // namespace

std::vector<PeerId> Checks::ids(const peer::Record& record) {
  std::vector<PeerId> ids;
  if (record) {
    for (const wire::Member& member : record->members) ids.push_back(member.id);
  }
  return ids;
}

void Checks::fail(const std::string& invariant, const std::string& what) {
  if (failed()) return;
  violation_ = invariant + " broken in seed " + std::to_string(world_.seed()) + " at event " +
               std::to_string(world_.timeline.events()) + ": " + what;
  world_.log("checks", violation_);
}

// -- starts and ends of calls

void Checks::started(const Host& host, const Reduction& reduction) {
  const auto* key = std::get_if<wire::OpKey>(&reduction.call->key);
  if (key == nullptr || key->admission == 0) return;  // it was never started
  Contribution contribution;
  contribution.since = reduction.since;
  contribution.shape = reduction.shape;
  contribution.position = reduction.position;
  contribution.op = reduction.op;
  for (const ArrayData& array : reduction.arrays) {
    contribution.arrays.emplace_back(array.dtype, array.values);
    contribution.left_before.push_back(array.left_before);
  }
  if (world_.bug_due(Bug::commit_alone))
    ++contribution.shape;  // as if it had been called differently
  if (world_.bug_due(Bug::skip_call)) ++contribution.position;
  contributions_[{reduction.run, *key}][host.engine().session().id()] = std::move(contribution);
}

void Checks::after_event(Host& host) {
  if (failed()) return;
  if (!disagreements_.empty()) settle_disagreements();
  const peer::Engine& engine = host.engine();
  if (engine.standing() == peer::Standing::out && engine.end().code == Code::internal_error)
    return fail("I1", host.name() + " failed by itself: " + engine.end().reason);
  keeps_no_ended_call(host);
  note_losses(engine.session().record());
  if (world_.options.masters > 1) one_history(host);
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
      if (*syncing.live != syncing.before && !syncing.hashes->mixed)
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
      // The results of the remaining members are in the first part of a gather's arrays.
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
      same_position(host, id, reduction);
      right_result(host, id, reduction);
      if (reduction.quantization) nothing_lost(host, id, reduction);
    }
    // A peer that was removed does not know the verdict, unless it received it before.
    if (commit || host.engine().standing() != peer::Standing::out) {
      Ending ending{host.engine().session().id(),
                    host.name(),
                    call.error.code,
                    0,
                    ids(call.record),
                    0,
                    call.error.peer,
                    {}};
      ending.epoch = call.record ? call.record->epoch : 0;
      if (commit) {
        // If inputs have parts, each member has its own result.
        if (!collective::scatters(reduction.kind)) {
          for (const ArrayData& array : reduction.arrays) ending.bytes.push_back(array.result());
        }
      }
      std::vector<Ending>& endings = operations_[id];
      if (commit && !endings.empty() && world_.bug_due(Bug::split_commit))
        ending.members = {ending.peer};
      one_verdict(what, endings, ending);
      if (commit) bit_parity(what, endings, ending);
      if (commit && world_.options.masters > 1) one_membership(what, endings, ending);
      endings.push_back(std::move(ending));
    }
  }
  if (commit && !reduction.arrays.empty() && reduction.arrays.front().dtype == DataType::int64) {
    const wire::Bytes& bytes = reduction.arrays.front().result();
    reduction.result.resize(bytes.size() / sizeof(std::int64_t));
    if (!bytes.empty()) std::memcpy(reduction.result.data(), bytes.data(), bytes.size());
  }
  // The user reuses the memory now: the engine must neither write it nor send from it.
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
  Ending ending{host.engine().session().id(),
                host.name(),
                call.error.code,
                0,
                ids(call.record),
                call.answer,
                call.error.peer,
                {}};
  ending.epoch = call.record ? call.record->epoch : 0;
  std::vector<Ending>& endings = rounds_[{round.run, *key}];
  one_verdict(what, endings, ending);
  if (commit && world_.options.masters > 1) one_membership(what, endings, ending);
  if (commit && (key->kind == wire::RoundKind::admit || key->kind == wire::RoundKind::sync_admit))
    same_replicas(call.record);
  endings.push_back(std::move(ending));
}

void Checks::brings(const Syncing& syncing) {
  if (syncing.standing) standing_states_[syncing.run].insert(syncing.before);
}

void Checks::ended(Host& host, Syncing& syncing) {
  syncing.ended = true;
  for (const auto& copy : syncing.shared)
    if (world_.random.chance(0.5)) std::ranges::fill(*copy, 0x5a);
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
  if (live != syncing.before && !syncing.hashes->mixed)
    return fail("I3", "the state of " + host.name() + " was written in a sync");
  if (commit) host.mixed_.reset();
  if (!commit && syncing.hashes->mixed) host.mixed_ = live;
  const auto* key = std::get_if<wire::RoundKey>(&call.key);
  if (key == nullptr || key->admission == 0) return;
  if (!commit) {
    ++world_.report.sync_failures;
    if (host.engine().standing() == peer::Standing::out) return;
  } else {
    ++world_.report.syncs;
    world_.report.sync_bytes += call.update->rx_bytes;
    const bool writes = !call.update->writes.empty();
    Serial serial;
    call.update->place(serial);
    for (const state::Update::Replacement& replacement : call.update->replacements) {
      const std::uint8_t* bytes = replacement.bytes->data();
      live[replacement.what.name].assign(bytes, bytes + replacement.what.bytes);
    }
    if (world_.bug_due(Bug::stale_state) && writes) live = syncing.before;
    never_a_newcomers(host, syncing);
  }
  Ending ending{host.engine().session().id(),
                host.name(),
                call.error.code,
                0,
                ids(call.record),
                0,
                call.error.peer,
                {}};
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
  if (commit && world_.options.masters > 1) one_membership(what, endings, ending);
  endings.push_back(std::move(ending));
}

// -- several masters

// All members that have applied an epoch of one number have applied the same epoch.
void Checks::one_history(const Host& host) {
  const peer::Session& session = host.engine().session();
  const peer::Record& record = session.record();
  peer::Record& seen = seen_[session.id()];
  if (record == nullptr || (seen != nullptr && seen->epoch == record->epoch)) return;
  seen = record;
  one_run(host);
  wire::EpochRecord plain = *record;
  plain.state = {};  // outcomes change these
  plain.points = 0;
  plain.point_open = false;
  const auto [first, fresh] =
      epochs_.try_emplace({session.run(), host.group(), record->epoch}, plain);
  if (!fresh && first->second != plain)
    fail("one history", "epoch " + std::to_string(record->epoch) + " of " + host.name() +
                            " is another one than that of the first member that had it");
}

// No second run begins beside one of which a majority is there and can be reached.
void Checks::one_run(const Host& host) {
  const Options& faults = world_.options;
  if (faults.partitions + faults.cuts + faults.stalls + faults.freezes + faults.splits > 0) return;
  const std::uint64_t run = host.engine().session().run();
  std::map<std::uint64_t, std::pair<std::size_t, std::size_t>> others;  // members here, of all
  for (const auto& other : world_.hosts) {
    const peer::Session& session = other->engine().session();
    if (!other->alive() || other->program_over() || other->group() != host.group() ||
        session.run() == run || other->engine().standing() != peer::Standing::member)
      continue;
    auto& [here, all] = others[session.run()];
    ++here;
    all = std::max(all, session.record()->members.size());
  }
  for (const auto& [id, count] : others) {
    if (2 * count.first > count.second)
      fail("one run", host.name() + " is in another run than " + std::to_string(count.first) +
                          " of " + std::to_string(count.second) + " members of the one before");
  }
}

// An operation may be committed for different members on two sides, but only one side goes on.
void Checks::one_membership(const std::string& what, const std::vector<Ending>& before,
                            const Ending& now) {
  for (const Ending& other : before) {
    if (other.code == Code::ok && other.members != now.members)
      twos_.push_back({{other.peer, now.peer}, {other.epoch, now.epoch}, {}, what});
  }
  for (TwoMemberships& two : twos_) {
    for (std::size_t side = 0; side < 2; ++side) {
      if (two.peers[side] == now.peer && now.epoch > two.epochs[side]) two.go_on[side] = true;
    }
    if (two.go_on[0] && two.go_on[1])
      return fail("one membership", two.what + " was committed for different members on " +
                                        two.peers[0].brief() + " and " + two.peers[1].brief() +
                                        ", and both go on");
  }
}

// -- I8: a newcomer's state never counts

void Checks::never_a_newcomers(const Host& host, const Syncing& syncing) {
  if (!syncing.standing) return;
  // A standing member's state after a sync is one that a standing member brought.
  if (standing_states_[syncing.run].contains(*syncing.live)) return;
  fail("I8", host.name() + " was given a state that no standing member had");
}

// -- memory: nothing is kept of a call that is over

void Checks::keeps_no_ended_call(const Host& host) {
  const peer::CallTable& calls = host.engine().calls();
  for (const wire::OpKey& key : host.engine().locality().group().escalated()) {
    const peer::CallEntry* const entry = calls.find(key);
    const bool over = entry == nullptr || entry->phase == peer::CallPhase::over;
    if (over && calls.was_called(key))
      return fail("memory", host.name() + " still knows where " + wire::describe(key) + " ran");
  }
}

// -- I1: one verdict

// Two peers that are members of each other's epochs know the same verdict, for the same members. A
// peer that a restarted master did not wait for may know another one, unless it becomes a member
// again.
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

// Peers that disagree must not follow the same master.
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

// -- I2: equal and right

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

// -- I3: inputs survive

// The input is unchanged until the commit, and after a failure.
void Checks::inputs_survive(const Host& host, const Reduction& reduction) {
  for (const ArrayData& array : reduction.arrays) {
    if (array.send == array.input && array.left_out == array.left_before) continue;
    return fail("I3", "the input of " + wire::describe(reduction.call->key) + " on " + host.name() +
                          (reduction.call->done ? " is not what it was after the failure"
                                                : " was written before the commit"));
  }
}

// The engine does not use the memory of a call that is over.
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

// -- I4: no hang, no false alarm

std::size_t Checks::unfinished_segments(const Host& host) const {
  std::size_t segments = 0;
  for (const ReductionPtr& reduction : host.reductions()) {
    if (reduction->call->done) continue;
    for (const ArrayData& array : reduction->arrays) {
      const std::size_t bytes = std::max(array.input.size(), array.result().size());
      segments += bytes / world_.master_options.segment_bytes + 1;
    }
  }
  return segments;
}

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
    const auto late = [&](Instant since, Duration limit = kCallLimit) {
      return now - std::max(since, world_.calm_since()) > limit;
    };
    const Duration of_segment = std::max(kSegmentLimit, kSegmentPaces * world_.network.slowness);
    const Duration limit = kCallLimit + of_segment * unfinished_segments(*host);
    for (const ReductionPtr& reduction : host->reductions()) {
      if (!reduction->call->done && late(reduction->since, limit)) {
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

// Members whose calls can meet never get a deadlock error. Stuck members get one soon.
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
  // Blocked for a second, and for another one if operations have started over for a new plan.
  const auto& record = host.engine().session().record();
  const bool planned = record != nullptr && record->cause == wire::Cause::plan;
  if (world_.now() - latest > milliseconds(planned ? 3600 : 2600)) {
    fail("I4", what + " on " + host.name() + " was told only late that everybody was stuck");
  }
}

void Checks::every_second() {
  no_hang();
  replicas_are_whole();
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
  // Without faults, all members that disagree get mismatched_call, with the same culprit. The
  // master does not wait for a call that it hears of after the grace period.
  const Duration on_its_way = 25 * world_.network.slowness;  // a call, at most
  for (const auto& [id, contributions] : contributions_) {
    std::map<std::uint64_t, Instant> shapes;  // with the first call of each
    for (const auto& [peer, contribution] : contributions) {
      Instant& first = shapes.try_emplace(contribution.shape, Instant::max()).first->second;
      first = std::min(first, contribution.since);
    }
    if (shapes.size() < 2) continue;
    std::vector<Instant> firsts;
    for (const auto& [shape, first] : shapes) firsts.push_back(first);
    std::ranges::sort(firsts);
    std::map<std::uint64_t, std::size_t> votes;  // of which the master heard in time
    for (const auto& [peer, contribution] : contributions) {
      if (contribution.since + on_its_way <= firsts[1] + master::kMismatchGrace)
        ++votes[contribution.shape];
    }
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
