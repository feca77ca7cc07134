// The world of a simulated run: time, faults, the end.
#include "tests/simulation/sim_world.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace pccl::simulation {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {
constexpr std::size_t kTraceLines = 120;
constexpr std::uint64_t kMaxEvents = 20'000'000;

void add(std::vector<std::uint64_t>& sums, std::span<const std::uint64_t> counts) {
  sums.resize(counts.size());
  for (std::size_t i = 0; i < counts.size(); ++i) sums[i] += counts[i];
}
}  // namespace

Options Options::draw(std::uint64_t seed) {
  Random random(seed ^ 0x5eed);
  Options options;
  static constexpr Program kDrawn[] = {Program::explicit_api, Program::simple_api, Program::sync};
  options.program = kDrawn[random.below(3)];
  options.peers =
      static_cast<std::uint32_t>(random.chance(0.1) ? random.between(5, 8) : random.between(1, 4));
  options.joins = static_cast<std::uint32_t>(random.below(4));
  if (options.peers + options.joins > 8) options.joins = 8 - options.peers;
  options.steps = static_cast<std::uint32_t>(random.between(2, 6));
  options.max_elements =
      static_cast<std::uint32_t>(random.chance(0.1) ? 1500 : random.between(1, 200));
  options.everything_small = random.chance(0.8);
  const auto some = [&](double often, std::uint64_t most) {
    return static_cast<std::uint32_t>(random.chance(often) ? random.between(1, most) : 0);
  };
  options.kills = some(0.4, 2);
  options.freezes = some(0.2, 2);
  options.partitions = some(0.2, 2);
  options.cuts = some(0.4, 4);
  options.stalls = some(0.3, 4);
  options.corruptions = some(0.3, 2);
  options.leaves = some(0.2, 1);
  options.aborts = some(0.3, 3);
  options.restarts = some(0.25, 2);
  options.master_stalls = some(0.15, 2);
  options.machines =
      static_cast<std::uint32_t>(random.chance(0.5) ? 1 : (random.chance(0.3) ? 2 : 0));
  if (random.chance(0.15)) {
    options.ranks = static_cast<std::uint32_t>(random.between(1, 3));
    options.peers = static_cast<std::uint32_t>(random.between(1, 3));
    options.joins = static_cast<std::uint32_t>(random.below(3));
  }
  if (random.chance(0.15)) options.hidden = 25 * static_cast<std::uint32_t>(random.between(1, 4));
  if (options.hidden > 0 && random.chance(0.5)) options.relays = 1;
  if (random.chance(0.1)) options.patience = static_cast<std::uint32_t>(random.between(1, 3000));
  return options;
}

std::string Options::describe() const {
  std::ostringstream text;
  text << "program " << static_cast<int>(program) << " peers " << peers << " joins " << joins
       << " steps " << steps << " elements " << max_elements << " kills " << kills << " freezes "
       << freezes << " partitions " << partitions << " cuts " << cuts << " stalls " << stalls
       << " corruptions " << corruptions << " leaves " << leaves << " aborts " << aborts
       << " restarts " << restarts << " master stalls " << master_stalls << " machines " << machines
       << " masters " << masters << " splits " << splits << " lies " << lies << " ranks " << ranks
       << " hidden " << hidden << " relays " << relays << " patience " << patience;
  return text.str();
}

World::World(std::uint64_t seed, const Options& given)
    : options(given), random(seed), network(timeline, random), seed_(seed) {
  // The properties of this run's machines and network.
  const Duration paces[] = {microseconds(20), microseconds(200), milliseconds(2), milliseconds(20)};
  network.slowness = paces[random.below(4)];
  network.chatter = random.chance(0.5) ? 0.02 : 0.5;
  think =
      random.chance(0.5) ? milliseconds(1) : (random.chance(0.8) ? milliseconds(50) : seconds(3));
  capacity = random.chance(0.5) ? random.between(64, 600) : 16384;
  // Slow, but not so slow that waiting looks like a hang.
  if (network.slowness > milliseconds(2)) capacity = 16384;
  settings.stripes = static_cast<unsigned>(random.below(4));
  settings.checksum =
      options.corruptions > 0 || random.chance(0.5) ? Checksum::always : Checksum::automatic;
  master_options.relays = options.relays > 0;
  master_options.replan_interval = random.duration(milliseconds(1), seconds(4));
  Random measuring(~seed);  // separate, so that older seeds still draw the same runs
  if (measuring.chance(0.3)) {
    master_options.measure_after = Duration::zero();
  } else {
    master_options.measure_after =
        measuring.duration(milliseconds(1), measuring.chance(0.5) ? milliseconds(20) : seconds(1));
  }
  two_sites = measuring.chance(0.3);
  if (options.everything_small) {
    const std::uint32_t segments[] = {64, 128, 256, 1024};
    master_options.segment_bytes = segments[random.below(4)];
    // A single owner may let each other member send one segment at a time.
    if (network.slowness > milliseconds(2))
      master_options.segment_bytes = std::max(master_options.segment_bytes, 256U);
    master_options.thresholds.single_owner_bytes = 64;
    master_options.thresholds.direct_bytes = random.chance(0.5) ? 128 : 512;
    if (measuring.chance(0.3)) master_options.thresholds.mesh = 3;
    settings.segment_bytes = master_options.segment_bytes;
    settings.buffer_bytes = master_options.segment_bytes * random.between(4, 64);
    const std::uint32_t eager[] = {0, 200, 64 << 10};
    eager_bytes = eager[random.below(3)];
    eager_room = random.chance(0.5) ? 1024 : std::uint64_t{1} << 20;
  }
  const auto add = [&](Fault fault, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) {
      faults_.insert(
          faults_.begin() + static_cast<std::ptrdiff_t>(random.below(faults_.size() + 1)), fault);
    }
  };
  add(Fault::join, options.joins);
  add(Fault::kill, options.kills);
  add(Fault::freeze, options.freezes);
  add(Fault::partition, options.partitions);
  add(Fault::cut, options.cuts);
  add(Fault::stall, options.stalls);
  add(Fault::corrupt, options.corruptions);
  add(Fault::leave, options.leaves);
  add(Fault::abort, options.aborts);
  add(Fault::restart, options.restarts);
  add(Fault::master_stall, options.master_stalls);
  add(Fault::split, options.splits);
  add(Fault::lie, options.lies);
  for (std::uint32_t index = 1; index < options.masters; ++index)
    more_masters.emplace_back(*this, index);
  block_bytes = 64U << random.below(3);
  if (options.machines > 0 && random.chance(0.6)) arrays_shared = random.chance(0.6) ? 1 : 0.9;
  if (options.machines > 0 && random.chance(0.1)) memory_refused = random.chance(0.5) ? 0.05 : 0.5;
  const std::uint64_t gaps[] = {20, 100, 400, 1500};
  fault_gap_ = gaps[random.below(4)];
  next_fault_ = random.between(1, fault_gap_ * 2);
}

// -- peers

PeerId World::new_id() {
  PeerId id;
  for (std::uint8_t& byte : id.bytes) byte = static_cast<std::uint8_t>(random.next());
  return id;
}

void World::add_peer() {
  if (options.ranks > 0) {
    add_replica("r" + std::to_string(lives.size()));
  } else {
    add_host({});
  }
}

// Starts the ranks of a replica at about the same time.
void World::add_replica(const std::string& name) {
  const std::size_t life = lives.size();
  lives.push_back({name, {}, false, false, false});
  const Duration spread = random.chance(0.7) ? milliseconds(20) : seconds(12);
  for (std::uint32_t group = 0; group < options.ranks; ++group) {
    const Duration delay = random.chance(0.4) ? Duration(0) : random.duration(Duration(0), spread);
    disturb_until(now() + delay);
    timeline.after(delay, [this, group, name, life] {
      if (!lives[life].over) add_host({group, name, life});
    });
  }
}

// Ends a replica after one of its ranks has ended, as the user's launcher would: kills ranks that
// only wait. Ranks that are members must learn of the loss from the master.
void World::rank_ended(const Host& host) {
  if (options.ranks == 0 || host.ended_well() || lives[host.rank_id().life].over) return;
  const std::size_t life = host.rank_id().life;
  lives[life].over = true;
  const Duration delay = random.duration(Duration(0), seconds(random.chance(0.5) ? 1 : 15));
  disturb_until(now() + delay);
  timeline.after(delay, [this, life] {
    for (Host* other : lives[life].hosts) {
      if (other->program_over() || other->engine().standing() == peer::Standing::member) continue;
      log(other->name(), "is ended by who started it");
      other->kill();
    }
    // Reuse the name only now: ranks of two lives must not be taken for one replica.
    if (lives[life].comes_back) add_replica(std::string(lives[life].name));
  });
}

Host& World::add_host(const RankId& rank_id) {
  const auto node = static_cast<NodeId>(hosts.size() + 1);
  hosts.push_back(std::make_unique<Host>(*this, node, rank_id));
  if (options.ranks > 0) lives[rank_id.life].hosts.push_back(hosts.back().get());
  Host& host = *hosts.back();
  log(host.name(), "starts");
  host.start();
  return host;
}

std::optional<NodeId> World::node_at(const wire::Address& address) const {
  if (address.host.size() < 2 || address.host[0] != 'h') return std::nullopt;
  return static_cast<NodeId>(std::stoul(address.host.substr(1)));
}

Host* World::host_of(const PeerId& id) {
  for (const auto& host : hosts) {
    if (host->engine().session().id() == id) return host.get();
  }
  return nullptr;
}

Host* World::host_at(NodeId node) {
  for (const auto& host : hosts) {
    if (host->node() == node) return host.get();
  }
  return nullptr;
}

// Checks an eviction for unreachable links: only links to hidden peers fail in this world.
void World::judge_unreachable(const Host& host) {
  const std::uint32_t others = options.partitions + options.cuts + options.stalls +
                               options.corruptions + options.freezes + options.master_stalls +
                               options.restarts + options.splits;
  if (others > 0 || options.ranks > 0 || host.engine().end().code != Code::unreachable) return;
  // A newcomer may be unable to reach the only holder of the state. Later there are more holders.
  if (host.engine().end().reason.find("holders") != std::string::npos) return;
  const peer::Record& group = host.engine().session().record();
  const auto suffices = [&](const wire::Member& member) {
    const Host* const other = host_of(member.id);
    return other != nullptr && other->alive() && network.nat_of(other->node()) == 0;
  };
  const bool needless =
      options.relays > 0 || network.nat_of(host.node()) == 0 ||
      (group != nullptr && std::any_of(group->members.begin(), group->members.end(), suffices));
  if (needless)
    checks.fail("I4", host.name() +
                          " is put out for links that nobody needs: " + host.engine().end().reason);
}

// Whether so many of its group have finished that the others are no majority.
bool World::left_at_the_end(const Host& host) {
  const peer::Record& group = host.engine().session().record();
  if (group == nullptr) return false;
  const auto here = std::ranges::count_if(group->members, [&](const wire::Member& member) {
    const Host* const other = host_of(member.id);
    return other != nullptr && !other->ended_well();
  });
  return 2 * static_cast<std::size_t>(here) <= group->members.size();
}

// Whether all masters but the one that is gone were told of an epoch, and the member is alone: it
// is not more than the liar of each. Newcomers that come when it is out find the liar alone.
bool World::is_outnumbered(const Host& host) {
  const bool all = options.lies > 0 && options.lies + 1 >= options.masters;
  if (!all) return false;
  const peer::Record& group = host.engine().session().record();
  if (group != nullptr) return group->members.size() == 1;
  return std::ranges::none_of(hosts, [](const auto& other) {
    return !other->program_over() && other->engine().session().member();
  });
}

void World::came_back_as_newcomer(const Host& host) {
  const bool lost = host.engine().end().code == Code::master_lost;
  const bool member = host.engine().session().member();
  const bool counts = !is_outnumbered(host) && (member ? !left_at_the_end(host) : !lost);
  if (counts) ++report.evictions;
  if (counts && lost) ++report.master_lost;
  judge_unreachable(host);
  if (comebacks_ == 0) return;
  const Duration delay = random.duration(Duration(0), seconds(1));
  if (options.ranks == 0) {
    --comebacks_;
    timeline.after(delay, [this] { add_peer(); });
    return;
  }
  Life& life = lives[host.rank_id().life];
  if (life.replaced) return;
  life.replaced = true;
  --comebacks_;
  life.comes_back = random.chance(0.7);
  if (!life.comes_back) timeline.after(delay, [this] { add_peer(); });
}

bool World::bug_due(Bug bug) {
  // Skip some opportunities, to hit an ordinary moment.
  if (options.bug != bug || bug_done_ || random.chance(0.7)) return false;
  bug_done_ = true;
  log("bug", "strikes now");
  return true;
}

void World::log(const std::string& who, const std::string& what) {
  if (!options.trace) return;
  std::ostringstream line;
  line.precision(6);
  line << std::fixed << in_seconds(now() - Instant(seconds(1000))) << " #" << timeline.events()
       << " " << who << ": " << what;
  trace_.push_back(line.str());
}

// -- faults

Host* World::pick_host() {
  std::vector<Host*> able;
  for (const auto& host : hosts) {
    if (host->alive() && !host->frozen() && !host->program_over()) able.push_back(host.get());
  }
  return able.empty() ? nullptr : able[random.below(able.size())];
}

ConnectionPtr World::pick_connection(Host& host) {
  std::vector<ConnectionPtr> own;
  for (const ConnectionPtr& connection : network.connections()) {
    if (connection->node(0) == host.node() || connection->node(1) == host.node()) {
      own.push_back(connection);
    }
  }
  return own.empty() ? nullptr : own[random.below(own.size())];
}

void World::note(const char* fault, const Host* host) {
  ++report.faults;
  const std::string state = host == nullptr ? "master" : host->state();
  report.reached.emplace(fault, state);
  log("fault",
      std::string(fault) + (host == nullptr ? "" : " of " + host->name()) + " [" + state + "]");
  disturb_until(now());
}

namespace {

Duration some_time(Random& random) {
  const Duration times[] = {milliseconds(20), milliseconds(500), seconds(4), seconds(9),
                            seconds(25)};
  return random.duration(Duration(0), times[random.below(5)]);
}

}  // namespace

MasterHost& World::pick_master() {
  if (options.masters == 1) return master;
  if (random.chance(0.6)) {
    for (std::uint32_t i = 0; i < options.masters; ++i) {
      const master::Group* const group = master_at(i).group(0);
      if (group != nullptr && !group->record().members.empty() && !master_at(i).believes_a_lie())
        return master_at(i);
    }
  }
  return master_at(static_cast<std::uint32_t>(random.below(options.masters)));
}

void World::restart_master(MasterHost& which) {
  log("fault", which.name() + " ends");
  which.stop();
  const Duration away = random.chance(0.9) ? random.duration(Duration(0), seconds(6)) : seconds(14);
  disturb_until(now() + away);
  timeline.after(away, [this, &which] {
    log(which.name(), "a new one starts");
    which.start();
  });
}

// Cuts all nodes into two halves, which hear nothing of each other, or only one of the other.
void World::split() {
  note("split", nullptr);
  std::vector<NodeId> nodes;
  for (std::uint32_t i = 0; i < options.masters; ++i) nodes.push_back(master_at(i).node());
  for (const auto& host : hosts) nodes.push_back(host->node());
  const Instant until = now() + some_time(random);
  disturb_until(until);
  const bool both = random.chance(0.8);
  std::vector<bool> side;
  for (std::size_t i = 0; i < nodes.size(); ++i) side.push_back(random.chance(0.5));
  for (std::size_t a = 0; a < nodes.size(); ++a) {
    for (std::size_t b = 0; b < nodes.size(); ++b) {
      if (side[a] && !side[b]) network.block(nodes[a], nodes[b], until);
      if (!side[a] && side[b] && both) network.block(nodes[a], nodes[b], until);
    }
  }
}

// A peer that was never a member tells a master that serves nothing of an epoch of its own. A peer
// that is new would believe it.
void World::lie() {
  const auto idle = [](const MasterHost& which) {
    const master::Group* const group = which.group(0);
    return which.running() && (group == nullptr || group->record().members.empty());
  };
  const bool complete = std::ranges::all_of(hosts, [](const auto& host) {
    return host->program_over() || host->engine().session().member();
  });
  const Host* const host = pick_host();
  if (host == nullptr || !complete) return faults_.push_back(Fault::lie);
  const auto first = static_cast<std::uint32_t>(random.below(options.masters));
  for (std::uint32_t i = 0; i < options.masters; ++i) {
    MasterHost& which = master_at((first + i) % options.masters);
    if (!idle(which)) continue;
    note("lie", nullptr);
    return which.hear_lie(host->engine().session());
  }
}

// Kills or freezes a peer.
void World::stop(Fault fault, Host& host) {
  if (!host.alive() || host.frozen() || host.program_over()) return;
  if (fault == Fault::kill) {
    note("kill", &host);
    ++report.kills;
    host.kill();
    // The peer's process was a standby too.
    if (options.masters > 1 && random.chance(0.25)) {
      MasterHost& which = pick_master();
      if (which.running()) restart_master(which);
    }
    return;
  }
  note("freeze", &host);
  host.freeze();
  if (random.chance(0.3)) return;  // until the end
  const Instant until = now() + some_time(random);
  disturb_until(until);
  timeline.at(until, [&host] {
    if (host.alive()) host.resume();
  });
}

void World::inject() {
  if (faults_.empty() || timeline.events() < next_fault_) return;
  // Several masters begin no run in their first seconds.
  if (options.masters > 1 && now() < Instant(seconds(1000)) + milliseconds(3200)) return;
  next_fault_ = timeline.events() + random.between(1, fault_gap_ * 2);
  const Fault fault = faults_.back();
  faults_.pop_back();
  strike(fault);
}

void World::strike(Fault fault) {
  if (fault == Fault::join) {
    ++report.joins;
    add_peer();
    return;
  }
  if (fault == Fault::restart) {
    MasterHost& which = pick_master();
    if (!which.running()) return;
    note("restart", nullptr);
    ++report.restarts;
    return restart_master(which);
  }
  if (fault == Fault::master_stall) {
    MasterHost& which = pick_master();
    if (!which.running()) return;
    note("master stall", nullptr);
    const Duration longest = options.masters > 1 && random.chance(0.7) ? seconds(25) : seconds(5);
    const Instant until = now() + random.duration(Duration(0), longest);
    disturb_until(until);
    which.stall(until);
    return;
  }
  if (fault == Fault::split) return split();
  if (fault == Fault::lie) return lie();
  Host* host = pick_host();
  if (host == nullptr) return;
  switch (fault) {
    case Fault::kill:
    case Fault::freeze:
      // Sometimes between a change in memory and the message about it.
      if (host->engine().locality().group().is_open() && random.chance(0.5)) {
        host->memory().strike_at_step([this, fault, host] { stop(fault, *host); });
      } else {
        stop(fault, *host);
      }
      break;
    case Fault::partition: {
      note("partition", host);
      NodeId other = pick_master().node();
      Host* const second = pick_host();
      if (random.chance(0.7) && second != nullptr && second != host) other = second->node();
      const Instant until = now() + some_time(random);
      disturb_until(until);
      const bool both = random.chance(0.5);
      network.block(host->node(), other, until);
      if (both) network.block(other, host->node(), until);
      log("fault", "between h" + std::to_string(host->node()) + " and h" + std::to_string(other) +
                       (both ? ", both ways" : ", one way"));
      break;
    }
    case Fault::cut: {
      note("cut", host);
      const ConnectionPtr connection = pick_connection(*host);
      if (connection == nullptr) break;
      log("fault", "cuts h" + std::to_string(connection->node(0)) + " - h" +
                       std::to_string(connection->node(1)));
      connection->cut(random.chance(0.2) ? static_cast<int>(random.below(2)) : -1);
      break;
    }
    case Fault::stall: {
      note("stall", host);
      const ConnectionPtr connection = pick_connection(*host);
      if (connection == nullptr) break;
      const Instant until = now() + some_time(random);
      disturb_until(until);
      connection->stall(static_cast<int>(random.below(2)), until);
      break;
    }
    case Fault::corrupt:
      note("corrupt", host);
      host->corrupt_next();
      break;
    case Fault::leave:
      note("leave", host);
      host->engine().leave("", now());
      host->settle();
      break;
    case Fault::abort: {
      note("abort", host);
      std::vector<peer::CallPtr> open;
      for (const ReductionPtr& reduction : host->reductions()) {
        if (!reduction->call->done) open.push_back(reduction->call);
      }
      for (const RoundEntry& round : host->rounds()) {
        if (!round.call->done) open.push_back(round.call);
      }
      if (host->syncing() && !host->syncing()->call->done) open.push_back(host->syncing()->call);
      if (open.empty()) break;
      const Code code = random.chance(0.5) ? Code::timeout : Code::interrupted;
      host->engine().give_up(open[random.below(open.size())], code, now());
      host->settle();
      break;
    }
    default:
      break;
  }
}

// -- the run

// Whether the peer is a newcomer that waits for a frozen rank of its replica.
bool World::waits_for_frozen(const Host& host) const {
  if (options.ranks == 0 || host.engine().standing() == peer::Standing::member) return false;
  const std::vector<Host*>& ranks = lives[host.rank_id().life].hosts;
  return std::any_of(ranks.begin(), ranks.end(), [](const Host* rank) { return rank->frozen(); });
}

bool World::over() {
  bool all = true;
  bool frozen = false;
  for (const auto& host : hosts) {
    if (host->program_over()) continue;
    if (host->frozen() || waits_for_frozen(*host)) {
      frozen = true;
    } else {
      all = false;
    }
  }
  if (!all) return false;
  if (!frozen) return true;
  // Permanently frozen peers wake up when all is over, and must do no harm.
  disturb_until(now());
  for (const auto& host : hosts) host->resume();
  return false;
}

Report World::run() {
  master.start();
  for (MasterHost& more : more_masters) more.start();
  for (std::uint32_t i = 0; i < options.peers; ++i) {
    if (i == 0 || random.chance(0.5)) {
      add_peer();
    } else {
      timeline.after(random.duration(Duration(0), milliseconds(500)), [this] { add_peer(); });
    }
  }
  disturb_until(now() + milliseconds(500));
  const Instant begin = now();
  while (!checks.failed()) {
    if (timeline.events() > kMaxEvents) checks.fail("I4", "the run does not come to its end");
    if (!timeline.step()) {
      checks.fail("I4", "nothing is planned any more, and somebody still waits");
      break;
    }
    inject();
    if (timeline.events() >= next_rebuild_) {
      next_rebuild_ = timeline.events() + random.between(1, 400);
      checks.rebuild_now();
    }
    if (now() >= next_second_) {
      next_second_ = now() + seconds(1);
      checks.every_second();
    }
    if (timeline.events() % 8 == 0 && now() - begin > milliseconds(600) && over()) break;
  }
  checks.at_the_end();
  for (const auto& host : hosts) {
    report.stand_ins += host->engine().links().stand_ins();
    add(report.link_transitions, host->engine().links().transitions_taken());
    add(report.call_transitions, host->engine().calls().transitions_taken());
    report.sent_again += host->engine().links().sent_again();
    if (host->engine().session().record()) {
      report.epochs = std::max(report.epochs, host->engine().session().record()->epoch);
    }
  }
  report.events = timeline.events();
  report.seconds = in_seconds(now() - begin);
  report.violation = checks.violation();
  report.trace.assign(trace_.begin(), trace_.end());
  return std::move(report);
}

Report simulate(std::uint64_t seed, const Options& options) {
  World world(seed, options);
  return world.run();
}

}  // namespace pccl::simulation
