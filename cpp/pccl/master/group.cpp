#include "pccl/master/group.h"

#include <algorithm>
#include <utility>

#include "pccl/base/overloaded.h"
#include "pccl/base/text.h"
#include "pccl/digest/ticket.h"

namespace pccl::master {
namespace {

// Peers that join within this time of each other were perhaps meant to start together.
constexpr Duration kTogether = std::chrono::seconds(10);
constexpr const char* kHowTogether =
    "To start peers together, let them wait for each other with min_peers (PCCL_MIN_PEERS, or "
    "`pccl "
    "master --min-peers N`)";

std::string seconds(Duration duration) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(duration).count()) + " s";
}

}  // namespace

// -- queries

std::vector<PeerId> Group::ask_members(const wire::Try& question, std::size_t most,
                                       const std::function<bool(ConnectionId)>& fit) {
  std::vector<PeerId> asked;
  for (const Peer& peer : peers_.members) {
    if (asked.size() >= most) break;
    if (peer.connection == 0 || !fit(peer.connection)) continue;
    around_.send(peer.connection, log_.collected(), question);
    asked.push_back(peer.member.id);
  }
  return asked;
}

PeerId Group::member_on(ConnectionId connection) const {
  for (const Peer& peer : peers_.members)
    if (peer.connection == connection) return peer.member.id;
  return {};
}

bool Group::knows(ConnectionId connection) const {
  return const_cast<Peers&>(peers_).on(connection) != nullptr;
}

std::string Group::summary() const {
  std::string text = "epoch " + std::to_string(record_.epoch) + " members";
  for (const Peer& peer : peers_.members) text += " " + peer.member.id.brief();
  return text + calls_.summary();
}

// -- decisions

void Group::append(DecisionLog::Decision what) {
  const wire::Log message{{log_.append(std::move(what))}};
  for (const Peer& peer : peers_.members) {
    if (peer.connection != 0) around_.send(peer.connection, log_.collected(), message);
  }
}

void Group::collect_log() {
  std::uint64_t least = log_.last();
  for (const Peer& peer : peers_.members) least = std::min(least, peer.applied);
  log_.collect(least);
}

// Sends a member the log entries after ordinal `after`.
void Group::send_log(const Peer& to, std::uint64_t after) {
  for (auto& part : wire::in_parts(log_.after(after)))
    around_.send(to.connection, log_.collected(), wire::Log{std::move(part)});
}

// Ends a call for all members, including those that enter it later.
void Group::decide(const wire::CallKey& key, Code code, const PeerId& culprit,
                   const std::string& reason, const std::string& waiting,
                   const wire::SyncDecision& sync) {
  if (const auto* op = std::get_if<wire::OpKey>(&key)) {
    const bool come_here =
        code == Code::ok && (newcomers_ready() || planning_.measuring_helps(record_.admission));
    append(wire::Verdict{*op, record_.epoch, code, come_here, culprit, reason, waiting});
  } else {
    const auto& round = std::get<wire::RoundKey>(key);
    const bool yes = round.kind == wire::RoundKind::peers_pending
                         ? newcomers_ready()
                         : code == Code::ok && measure_at(round);
    const wire::Outcome outcome{round,   code,   yes ? 1U : 0U, around_.census(),
                                culprit, reason, waiting,       sync};
    append(outcome);
    wire::apply(outcome, record_);
  }
  calls_.erase(key);
}

// Begins an epoch in which operations in progress start over. `aborted`: operations that have
// ended.
void Group::start_over(wire::Cause cause, std::vector<wire::Departure> departures,
                       std::vector<wire::OpKey> aborted) {
  calls_.restart();
  begin_epoch(cause, std::move(departures), std::move(aborted));
}

// Begins an epoch of the present members. REQUIRES: plan_epoch() succeeded, or there are no
// members.
void Group::begin_epoch(wire::Cause cause, std::vector<wire::Departure> departures,
                        std::vector<wire::OpKey> aborted) {
  ++record_.epoch;
  record_.cause = cause;
  if (cause == wire::Cause::admission) {
    record_.admission = record_.epoch;
  } else {
    record_.syncing = false;
  }
  record_.abort_floor = record_.epoch;
  record_.members.clear();
  for (const Peer& peer : peers_.members) record_.members.push_back(peer.member);
  record_.ranks_per_replica = peers_.ranks_per_replica;
  std::erase_if(record_.state.holders,
                [&](const PeerId& id) { return peers_.member(id) == nullptr; });
  record_.census = around_.census();
  record_.departures = std::move(departures);
  record_.aborted = std::move(aborted);
  if (peers_.members.empty()) record_.relayed.clear();
  append(record_);
  for (const Pair& pair : links_.end_relays(relayed_pairs(record_)))
    around_.end_relay(pair.first, pair.second);
  links_.begin_epoch();
  tell_newcomers();
}

// -- newcomers

std::optional<std::string> Group::refusal_of(const wire::Join& join, const PeerId& seal) const {
  const Limits& limits = options_.limits;
  if (peers_.members.size() + peers_.candidates.size() >= limits.max_peers) {
    return "group " + std::to_string(id_) + " is full (" + plural(limits.max_peers, "peer") + ")";
  }
  const bool taken = std::ranges::any_of(peers_.candidates, [&](const Peer& other) {
    return other.member.id == join.id && other.member.seal != seal;
  });
  if (join.id.empty() || peers_.member(join.id) != nullptr || taken)
    return "peer id " + join.id.brief() + " is in use";
  std::size_t bytes = 0;
  for (const wire::Address& address : join.addresses) bytes += address.host.size();
  // One more: the address that the master has added.
  if (join.addresses.size() > kMaxAddresses + 1 || bytes > kMaxAddressBytes) {
    return "a peer has at most " + plural(kMaxAddresses, "address", "es") + " of " +
           plural(kMaxAddressBytes, "byte") + " in all";
  }
  return std::nullopt;
}

void Group::add_candidate(ConnectionId connection, const wire::Join& join, const std::string& seen,
                          Instant now) {
  const PeerId seal = digest::seal_of(join.ticket);
  if (let_in_again(connection, join, seal, now)) return;
  if (const auto refusal = refusal_of(join, seal)) {
    around_.send(connection, 0, wire::Refused{Code::refused, *refusal});
    return around_.close(connection);
  }
  // A newcomer may join again before the master notices that its connection broke. The new
  // connection replaces the old one.
  for (const Peer& candidate : peers_.candidates) {
    if (candidate.member.id == join.id) around_.close(candidate.connection);
  }
  std::erase_if(peers_.candidates,
                [&](const Peer& candidate) { return candidate.member.id == join.id; });
  if (empty()) peers_.ranks_per_replica = join.ranks_per_replica;
  const bool started =
      peers_.ranks_per_replica > 0 ? around_.replicas().started() : !peers_.members.empty();
  Peer peer;
  peer.member = {
      join.id, around_.next_join_ordinal(), join.addresses, join.memory_key, join.replica, seal};
  peer.connection = connection;
  peer.heard = now;
  peer.min_peers = std::max(1U, join.min_peers);
  peer.order = join.order;
  peer.waiting = join.waiting && !(join.start_only && started);
  peer.start_only = join.start_only;
  peer.seen = seen;
  const std::uint64_t joined = peer.member.joined;
  peers_.candidates.push_back(std::move(peer));
  around_.send(connection, 0, wire::Welcome{joined, started, started ? 0 : missing(), seen});
  if (!peers_.members.empty()) {
    tell_newcomers();
    tell_lone_founder(now);
  } else {
    start_if_ready(now);
  }
  tell_namesake(connection);
}

// Warns a peer whose replica has the name of another one.
void Group::tell_namesake(ConnectionId connection) {
  const Peer* peer = peers_.on(connection);
  if (peer == nullptr || peer->member.replica.empty()) return;
  const auto has_name = [&](const Peer& other) {
    return other.member.replica == peer->member.replica && other.member.id != peer->member.id;
  };
  if (std::ranges::none_of(peers_.members, has_name) &&
      std::ranges::none_of(peers_.candidates, has_name))
    return;
  around_.send(connection, 0,
               wire::Notice{"another peer is rank " + std::to_string(id_) +
                            " of a replica named \"" + peer->member.replica +
                            "\" already; this one waits until that one has left. Two replicas "
                            "need two names"});
}

// Tells a peer that it has started alone although others join at about the same time.
void Group::tell_lone_founder(Instant now) {
  if (!alone_since_ || peers_.members.size() != 1 || now - *alone_since_ >= kTogether) return;
  alone_since_.reset();
  around_.send(peers_.members.front().connection, log_.collected(),
               wire::Notice{"this peer has started group " + std::to_string(id_) +
                            " alone, and another one has joined since. It is admitted at "
                            "pccl.admit() or pccl.sync(). " +
                            kHowTogether});
}

// Handles a Join of a member whose connection broke before it received its admission. Sends the log
// from the admission on. False: the peer is not such a member.
bool Group::let_in_again(ConnectionId connection, const wire::Join& join, const PeerId& seal,
                         Instant now) {
  Peer* peer = peers_.member(join.id);
  if (peer == nullptr || peer->member.seal != seal) return false;
  const auto admission = std::ranges::find_if(log_.entries(), [&](const wire::LogEntry& entry) {
    const auto* record = std::get_if<wire::EpochRecord>(&entry.what);
    return record != nullptr && record->cause == wire::Cause::admission &&
           std::ranges::any_of(record->members,
                               [&](const wire::Member& known) { return known.id == join.id; });
  });
  if (admission == log_.entries().end() || admission->ordinal <= peer->applied) return false;
  if (peer->connection != 0) around_.close(peer->connection);
  peer->connection = connection;
  peer->returned = true;
  peer->heard = now;
  if (floods(*peer, Budget::kReturnItems, now)) return true;
  around_.send(connection, 0, wire::Welcome{peer->member.joined, true, 0, peer->seen});
  send_log(*peer, admission->ordinal - 1);
  around_.send(connection, log_.collected(), expected());
  return true;
}

// The number of peers or replicas that must still join before the group can start.
std::uint32_t Group::missing() const {
  if (peers_.ranks_per_replica > 0) return around_.replicas().missing();
  std::uint32_t wanted = options_.min_peers;
  std::uint32_t present = 0;
  for (const Peer& candidate : peers_.candidates) {
    if (!candidate.waiting) continue;
    ++present;
    wanted = std::max(wanted, candidate.min_peers);
  }
  return wanted > present ? wanted - present : 0;
}

// Starts a group without members once as many peers wait as the largest min_peers among them.
void Group::start_if_ready(Instant now) {
  if (peers_.ranks_per_replica > 0) return around_.replicas().changed();
  const bool somebody = std::ranges::any_of(
      peers_.candidates, [](const Peer& candidate) { return candidate.waiting; });
  if (!peers_.members.empty() || !somebody || missing() > 0) return;
  std::vector<Peer> founders;
  for (std::size_t at = 0; at < peers_.candidates.size();) {
    if (peers_.candidates[at].waiting) {
      founders.push_back(peers_.take_candidate(at, log_.last()));
    } else {
      ++at;
    }
  }
  std::ranges::stable_sort(founders,
                           [](const Peer& a, const Peer& b) { return a.order < b.order; });
  start(std::move(founders));
  // Founders at level 1 always start alone and admit each other.
  if (peers_.members.size() != 1 || !peers_.members.front().start_only) return alone_since_.reset();
  alone_since_ = now;
  if (!others_at_ || now - *others_at_ >= kTogether) return;
  around_.send(peers_.members.front().connection, log_.collected(),
               wire::Notice{"this peer has started group " + std::to_string(id_) +
                            " alone, and another one has just left. " + kHowTogether});
}

void Group::start(std::vector<Peer> founders) {
  calls_.clear();
  log_.clear();
  links_.clear();
  planning_.begin_group();
  record_.state = {};
  record_.syncing = false;
  record_.rates = {};
  record_.point_open = false;
  peers_.members = std::move(founders);
  plan_epoch();
  context_.note("started with " + plural(peers_.members.size(), "peer"));
  begin_epoch(wire::Cause::admission, {}, {});
}

bool Group::newcomer_ready(const Peer& candidate) const {
  return candidate.waiting && candidate.connection != 0 &&
         candidate.prepared_epoch == record_.epoch;
}

bool Group::newcomers_ready() const {
  if (peers_.ranks_per_replica > 0)
    return around_.replicas().wait(id_, wire::next_point(record_, wire::RoundKind::admit));
  return std::ranges::any_of(peers_.candidates,
                             [&](const Peer& candidate) { return newcomer_ready(candidate); });
}

wire::Expect Group::expected() const {
  wire::Expect expect;
  for (const Peer& candidate : peers_.candidates) {
    if (!candidate.waiting) continue;
    expect.newcomers.push_back(candidate.member);
  }
  expect.ready = newcomers_ready();
  return expect;
}

// Tells newcomers which members to connect to, and members which newcomers to expect.
void Group::tell_newcomers() {
  if (peers_.members.empty()) return;
  const wire::Expect expect = expected();
  // Members first: they must know the newcomers that connect to them.
  for (const Peer& peer : peers_.members) {
    if (peer.connection != 0) around_.send(peer.connection, log_.collected(), expect);
  }
  const wire::Prepare prepare{record_.epoch, record_.members};
  for (const Peer& candidate : peers_.candidates) {
    if (candidate.waiting && candidate.prepared_epoch != record_.epoch) {
      around_.send(candidate.connection, 0, prepare);
    }
  }
}

// Admits newcomers: the ranks of these replicas in this order, or without replicas all that are
// ready.
void Group::let_newcomers_in(wire::RoundKind kind, const std::vector<std::string>& replicas) {
  // All members are in the same call, so all call numbers can restart.
  const std::size_t before = peers_.members.size();
  calls_.clear();
  const auto let_in = [&](const std::string& replica) {
    for (std::size_t at = 0; at < peers_.candidates.size();) {
      // Check fits() for each newcomer: two may fit alone but not together.
      if (newcomer_ready(peers_.candidates[at]) &&
          peers_.candidates[at].member.replica == replica &&
          (!replica.empty() || planning_.fits(peers_.candidates[at]))) {
        peers_.members.push_back(peers_.take_candidate(at, log_.last()));
        const PeerId id = peers_.members.back().member.id;
        for (const PeerId& other : std::exchange(peers_.members.back().unreachable, {}))
          links_.avoid(pair_of(id, other));
        if (!replica.empty()) return;  // one rank per replica
      } else {
        ++at;
      }
    }
  };
  if (peers_.ranks_per_replica == 0) let_in({});
  for (const std::string& replica : replicas) let_in(replica);
  if (!plan_epoch()) {
    links_.use_all();
    plan_epoch();
  }
  context_.note(plural(peers_.members.size() - before, "newcomer") + " admitted, " +
                plural(peers_.members.size(), "member"));
  const bool syncing = kind == wire::RoundKind::sync_admit;
  record_.syncing = syncing;
  if (peers_.ranks_per_replica > 0) {
    record_.points = wire::next_point(record_, kind);
    record_.point_open = syncing;
    around_.replicas().changed();
  }
  begin_epoch(wire::Cause::admission, {}, {});
}

// -- returning members

// Adopts decisions of the previous master that only this member holds. False: they are not valid.
bool Group::adopt(const std::vector<wire::LogEntry>& log, std::uint64_t applied) {
  const std::vector<wire::LogEntry> fresh = log_.adoptable(log, applied);
  if (fresh.empty()) return false;
  for (const wire::LogEntry& entry : fresh) {
    append(entry.what);
    std::visit(Overloaded{[](const wire::EpochRecord&) {},
                          [&](const wire::Verdict& verdict) { calls_.erase(verdict.key); },
                          [&](const wire::Outcome& outcome) {
                            wire::apply(outcome, record_);
                            calls_.erase(outcome.key);
                          }},
               entry.what);
  }
  log_.adopted();
  return true;
}

Group::Return Group::rejoin(ConnectionId connection, const wire::Rejoin& rejoin,
                            const std::vector<wire::LogEntry>* log, Instant now) {
  Peer* peer = peers_.member(rejoin.id);
  // A peer that knows only the member's id cannot replace it.
  if (peer == nullptr || peer->member.seal != digest::seal_of(rejoin.ticket)) return Return::out;
  // The log no longer has the entries that the member lacks.
  if (rejoin.applied < log_.collected()) return Return::out;
  if (rejoin.applied > log_.last()) {
    if (!log_.as_restored() || rejoin.record.epoch != record_.epoch) return Return::out;
    if (log == nullptr) return Return::needs_log;
    if (!adopt(*log, rejoin.applied)) return Return::out;
  }
  if (peer->connection != 0) around_.close(peer->connection);
  peer->connection = connection;
  peer->returned = true;
  peer->heard = now;
  peer->blocked = {};
  // The member repeats its open calls; entries that it has not applied are sent again.
  peer->applied = std::max(peer->applied, rejoin.applied);
  if (floods(*peer,
             Budget::kReturnItems + Budget::kMissedEntryItems * (log_.last() - rejoin.applied),
             now))
    return Return::in;
  around_.send(connection, log_.collected(), wire::Welcome{peer->member.joined, true, 0, {}});
  send_log(*peer, rejoin.applied);
  // The newcomers may have changed meanwhile.
  around_.send(connection, log_.collected(), expected());
  return Return::in;
}

std::unique_ptr<Group> Group::rebuild(std::uint32_t id, const Options& options,
                                      Surroundings& around, const std::vector<Returned>& reports,
                                      const std::vector<wire::LogEntry>& log, Instant now) {
  auto group = std::make_unique<Group>(id, options, around);
  const Returned& best = newest(reports);
  wire::EpochRecord& record = group->record_;
  record = best.rejoin().record;
  group->peers_.ranks_per_replica = record.ranks_per_replica;
  const std::size_t n = record.members.size();
  if (record.rates.hosts.size() != n || record.rates.links.size() != n * n) record.rates = {};
  group->planning_.restore_rates(record.rates);
  group->log_.restore(log, best.at().second);
  std::vector<Peer>& members = group->peers_.members;
  for (const wire::Member& member : record.members) {
    Peer peer;
    peer.member = member;
    peer.heard = now;
    peer.disconnected_at = now;
    peer.applied = group->log_.collected();
    peer.returned = false;
    members.push_back(std::move(peer));
  }
  // Assume that members still share memory. A member that does not reports it.
  const std::vector<std::uint32_t>& hosts = record.plan.hosts;
  for (std::size_t a = 0; a < hosts.size() && a < members.size(); ++a) {
    for (std::size_t b = 0; b < hosts.size() && b < members.size(); ++b) {
      if (a != b && hosts[a] == hosts[b]) members[a].shares_with.insert(members[b].member.id);
    }
  }
  for (const Pair& pair : relayed_pairs(record)) group->links_.avoid(pair);
  for (const Returned& one : reports) {
    if (group->rejoin(one.connection(), one.rejoin(), nullptr, now) == Return::in) continue;
    around.send(one.connection(), 0,
                wire::Refused{Code::evicted, "the run went on without this peer"});
    around.close(one.connection());
  }
  return group;
}

// -- replicas

std::vector<RankStanding> Group::ranks() const {
  std::vector<RankStanding> ranks;
  if (peers_.ranks_per_replica == 0) return ranks;
  for (const Peer& peer : peers_.members) ranks.push_back({peer.member, 1, true, false, false});
  for (const Peer& peer : peers_.candidates) {
    ranks.push_back({peer.member, peer.min_peers, false, peer.waiting, newcomer_ready(peer)});
  }
  return ranks;
}

bool Group::busy(const PeerId& id) const {
  // A member that is alone waits for no other member.
  return peers_.members.size() > 1 && calls_.busy(id);
}

void Group::start_with(const std::vector<std::string>& replicas, std::uint64_t points) {
  std::vector<Peer> founders;
  for (const std::string& replica : replicas) {
    const auto first = std::ranges::find_if(peers_.candidates, [&](const Peer& candidate) {
      return candidate.waiting && candidate.member.replica == replica;
    });
    if (first == peers_.candidates.end()) continue;
    founders.push_back(peers_.take_candidate(
        static_cast<std::size_t>(first - peers_.candidates.begin()), log_.last()));
  }
  record_.points = points;
  start(std::move(founders));
}

void Group::leave_behind() {
  for (Peer& candidate : peers_.candidates) {
    if (!candidate.waiting || !candidate.start_only) continue;
    candidate.waiting = false;
    around_.send(candidate.connection, 0,
                 wire::Welcome{candidate.member.joined, true, 0, candidate.seen});
  }
}

void Group::retry_admission(Instant now) {
  std::vector<wire::RoundKey> keys;
  for (const auto& [key, round] : calls_.rounds()) {
    if (key.kind == wire::RoundKind::admit || key.kind == wire::RoundKind::sync_admit)
      keys.push_back(key);
  }
  for (const wire::RoundKey& key : keys) check_round(key, now);
}

void Group::evict_rank(const std::string& replica, bool members, bool newcomers,
                       const std::string& reason, Instant now) {
  std::vector<ConnectionId> waiting;
  for (const Peer& candidate : peers_.candidates) {
    if (newcomers && candidate.member.replica == replica) waiting.push_back(candidate.connection);
  }
  for (const ConnectionId connection : waiting) evict(connection, Code::evicted, reason, now);
  std::vector<Departed> gone;
  for (const Peer& peer : peers_.members) {
    if (members && peer.member.replica == replica)
      gone.push_back({peer.member.id, Code::evicted, reason});
  }
  remove(gone, now);
}

void Group::tell_rank(const std::string& replica, const std::string& text) {
  for (const Peer& candidate : peers_.candidates) {
    if (candidate.member.replica == replica)
      around_.send(candidate.connection, 0, wire::Notice{text});
  }
}

// -- departures

void Group::evict(ConnectionId connection, Code code, const std::string& reason, Instant now) {
  Peer* peer = peers_.on(connection);
  if (peer == nullptr) return;
  if (peers_.member(peer->member.id) == peer) {
    remove({{peer->member.id, code, reason}}, now);
    return;
  }
  others_at_ = now;
  around_.send(connection, 0, wire::Refused{code, reason});
  around_.close(connection);
  const wire::Member gone = peer->member;
  peers_.drop_candidate(connection);
  tell_newcomers();
  around_.replicas().departed(id_, gone, reason, false, false);
}

void Group::remove(const std::vector<Departed>& departed, Instant now) {
  std::vector<wire::Departure> departures;
  for (const Departed& gone : departed) {
    Peer* peer = peers_.member(gone.id);
    if (peer == nullptr) continue;
    const std::size_t left = peers_.members.size() - 1;
    context_.note("peer " + gone.id.brief() + " is out: " + gone.reason + "; " +
                  plural(left, "member") + (left == 1 ? " goes on" : " go on"));
    if (peer->connection != 0) {
      around_.send(peer->connection, log_.collected(), wire::Refused{gone.code, gone.reason});
      around_.close(peer->connection);
    }
    departures.push_back({gone.id, gone.reason});
    around_.replicas().departed(id_, peer->member, gone.reason, true, gone.finished);
    for (const Pair& pair : links_.drop_member(gone.id)) around_.end_relay(pair.first, pair.second);
    calls_.drop_member(gone.id);
    std::erase_if(peers_.members, [&](const Peer& other) { return other.member.id == gone.id; });
  }
  if (departures.empty()) return;
  others_at_ = now;
  // If no plan avoids the unusable links any more, try these links again instead of evicting
  // members.
  if (!peers_.members.empty() && !plan_epoch()) {
    links_.use_all();
    plan_epoch();
  }
  std::vector<wire::OpKey> aborted = calls_.abort_and_restart();
  if (peers_.members.empty()) aborted.clear();
  begin_epoch(wire::Cause::loss, std::move(departures), std::move(aborted));
  collect_log();
  check_calls(now);
  start_if_ready(now);
}

void Group::on_disconnect(ConnectionId connection, Instant now) {
  Peer* peer = peers_.on(connection);
  if (peer == nullptr) return;
  if (!peers_.is_member(*peer)) {
    const wire::Member away = peer->member;
    peers_.drop_candidate(connection);
    tell_newcomers();
    return around_.replicas().away(id_, away, "its control connection broke");
  }
  peer->connection = 0;
  peer->disconnected_at = now;
  check_links(now);
}

// Evicts members that lag too far: all others must keep the log entries that a laggard lacks.
void Group::evict_laggards(Instant now) {
  const std::size_t most = options_.limits.max_behind;
  if (log_.entries().size() <= most) return;
  std::vector<Departed> gone;
  for (const Peer& peer : peers_.members) {
    if (log_.last() - peer.applied > most)
      gone.push_back({peer.member.id, Code::evicted, "it does not follow the group's log"});
  }
  remove(gone, now);
}

void Group::evict_silent(Instant now) {
  const Duration limit = options_.heartbeat_timeout;
  std::vector<Departed> gone;
  for (const Peer& peer : peers_.members) {
    if (peer.connection != 0 && now - peer.heard >= limit) {
      gone.push_back({peer.member.id, Code::evicted, "not heard for " + seconds(limit)});
    } else if (peer.connection == 0 && now - peer.disconnected_at >= options_.reconnect_timeout) {
      gone.push_back({peer.member.id, Code::evicted,
                      "its control connection broke and did not come back within " +
                          seconds(options_.reconnect_timeout)});
    }
  }
  remove(gone, now);
  std::vector<ConnectionId> silent;
  for (const Peer& candidate : peers_.candidates) {
    if (now - candidate.heard >= limit) silent.push_back(candidate.connection);
  }
  for (const ConnectionId connection : silent)
    evict(connection, Code::evicted, "not heard for " + seconds(limit), now);
}

// Evicts the peer. Always returns false.
bool Group::misuse(const Peer& from, const std::string& what, Instant now) {
  evict(from.connection, Code::evicted, "protocol misuse: " + what, now);
  return false;
}

// Charges the peer for a message that an honest but stale peer sends occasionally. True: over the
// limit; the peer is evicted.
bool Group::stray(Peer& from, const char* what, Instant now) {
  if (from.budget.strays.take(options_.limits.strays, now)) return false;
  return !misuse(from, std::string("too many ") + what, now);
}

// Charges the peer for a message that takes the master's time. True: over the limit; the peer is
// evicted.
bool Group::floods(Peer& from, std::size_t items, Instant now) {
  if (from.budget.talk(options_.limits, items, now)) return false;
  return !misuse(from, "it floods the master", now);
}

// -- time

void Group::on_time(Instant now) {
  if (last_tick_ != Instant{} && now - last_tick_ > options_.heartbeat_timeout / 2) {
    // The master was frozen, perhaps with its peers: messages sent meanwhile are still to be read.
    for (Peer& peer : peers_.members) peer.heard = peer.disconnected_at = now;
    for (Peer& candidate : peers_.candidates) candidate.heard = now;
  }
  last_tick_ = now;
  evict_silent(now);
  check_plan(now);
  reconsider_plan(now);
  evict_laggards(now);
  check_links(now);
  check_calls(now);
  check_stuck(now);
  notice_stragglers(now);
  end_overdue(now);
}

}  // namespace pccl::master
