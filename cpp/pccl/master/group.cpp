#include "pccl/master/group.h"

#include <algorithm>
#include <utility>

#include "pccl/base/text.h"
#include "pccl/digest/ticket.h"

namespace pccl::master {
namespace {

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

bool Group::has(const PeerId& peer) const {
  const auto is_this = [&](const Peer& known) { return known.member.id == peer; };
  return std::ranges::any_of(peers_.members, is_this) ||
         std::ranges::any_of(peers_.candidates, is_this);
}

std::string Group::summary() const {
  std::string text = "epoch " + std::to_string(record_.epoch) + " members";
  for (const Peer& peer : peers_.members) text += " " + peer.member.id.brief();
  return text + calls_.summary();
}

// -- newcomers

void Group::add_candidate(ConnectionId connection, const wire::Join& join, const std::string& seen,
                          Instant now) {
  const Seal seal = digest::seal_of(join.ticket);
  if (let_in_again(connection, join, seal, now)) return;
  if (!newcomers_.add(connection, join, seal, seen, now)) return;
  if (peers_.members.empty()) start_if_ready(now);
  newcomers_.warn_namesake(connection);
}

// Handles a Join of a member whose connection broke before it received its admission. Sends the log
// from the admission on. False: the peer is not such a member.
bool Group::let_in_again(ConnectionId connection, const wire::Join& join, const Seal& seal,
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
  decisions_.send_log(*peer, admission->ordinal - 1);
  around_.send(connection, log_.collected(), newcomers_.expected());
  return true;
}

// Starts a group without members once enough peers wait.
void Group::start_if_ready(Instant now) {
  if (peers_.ranks_per_replica > 0) return around_.replicas().changed();
  if (!peers_.members.empty()) return;
  std::vector<Peer> founders = newcomers_.take_founders();
  if (founders.empty()) return;
  decisions_.start(std::move(founders));
  newcomers_.founded(now);
}

// -- returning members

Group::Return Group::rejoin(ConnectionId connection, const wire::Rejoin& rejoin, std::uint32_t term,
                            const std::vector<wire::LogEntry>* log, Instant now) {
  Peer* peer = peers_.member(rejoin.id);
  // A peer that knows only the member's id cannot replace it.
  if (peer == nullptr || peer->member.seal != digest::seal_of(rejoin.ticket)) return Return::out;
  // Its log and this one part before its end: it followed a master that was replaced.
  if (log_.epoch_at(rejoin.applied).value_or(rejoin.record.epoch) != rejoin.record.epoch)
    return Return::out;
  const bool parted = rejoin.record.epoch > record_.epoch ||
                      (rejoin.applied > log_.restored_at() && rejoin.applied <= log_.last());
  if (term < rebuilt_in_ && parted) return Return::out;
  // The log no longer has the entries that the member lacks.
  if (rejoin.applied < log_.collected()) return Return::out;
  if (rejoin.applied > log_.last()) {
    if (!log_.as_restored() || rejoin.record.epoch != record_.epoch) return Return::out;
    if (log == nullptr) return Return::needs_log;
    if (!decisions_.adopt(*log, rejoin.applied)) return Return::out;
  }
  if (peer->connection != 0) around_.close(peer->connection);
  peer->connection = connection;
  peer->returned = true;
  peer->heard = now;
  peer->on_blocked({}, 0, now);
  // The member repeats its open calls; entries that it has not applied are sent again.
  peer->applied = std::max(peer->applied, rejoin.applied);
  if (floods(*peer,
             Budget::kReturnItems + Budget::kMissedEntryItems * (log_.last() - rejoin.applied),
             now))
    return Return::in;
  around_.send(connection, log_.collected(), wire::Welcome{peer->member.joined, true, 0, {}});
  decisions_.send_log(*peer, rejoin.applied);
  // The newcomers may have changed meanwhile.
  around_.send(connection, log_.collected(), newcomers_.expected());
  return Return::in;
}

std::unique_ptr<Group> Group::rebuild(std::uint32_t id, const Options& options,
                                      Surroundings& around, const std::vector<Returned>& reports,
                                      const std::vector<wire::LogEntry>& log, Instant now) {
  return rebuild(id, options, around, newest(reports).rejoin(), reports, log, now);
}

std::unique_ptr<Group> Group::rebuild(std::uint32_t id, const Options& options,
                                      Surroundings& around, const wire::Rejoin& base,
                                      const std::vector<Returned>& reports,
                                      const std::vector<wire::LogEntry>& log, Instant now) {
  auto group = std::make_unique<Group>(id, options, around);
  wire::EpochRecord& record = group->record_;
  record = base.record;
  group->peers_.ranks_per_replica = record.ranks_per_replica;
  const std::size_t n = record.members.size();
  if (record.rates.hosts.size() != n || record.rates.links.size() != n * n) record.rates = {};
  group->planning_.restore_rates(record.rates);
  group->log_.restore(log, base.applied);
  std::vector<Peer>& members = group->peers_.members;
  for (const wire::Member& member : record.members) {
    Peer peer;
    peer.member = member;
    peer.heard = now;
    peer.since = now;
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
    if (group->rejoin(one.connection(), one.rejoin(), 0, nullptr, now) == Return::in) continue;
    // With several masters, that is not decided yet: it asks again.
    if (options.place.alone())
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
    ranks.push_back(
        {peer.member, peer.member.min_peers, false, peer.waiting, newcomers_.connected(peer)});
  }
  return ranks;
}

bool Group::busy(const PeerId& id) const {
  // A member that is alone waits for no other member.
  return peers_.members.size() > 1 && calls_.busy(id);
}

void Group::start_with(const std::vector<std::string>& replicas, std::uint64_t points) {
  std::vector<Peer> founders = newcomers_.take_founders(replicas);
  record_.points = points;
  decisions_.start(std::move(founders));
}

void Group::retry_admission(Instant now) {
  for (const wire::CallKey& key : calls_.keys()) {
    const auto* round = std::get_if<wire::RoundKey>(&key);
    if (round != nullptr &&
        (round->kind == wire::RoundKind::admit || round->kind == wire::RoundKind::sync_admit))
      check_call(key, now);
  }
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

// -- operators

std::vector<std::pair<PeerId, std::string>> Group::find(const std::string& name) const {
  std::vector<std::pair<PeerId, std::string>> found;
  for (const std::vector<Peer>* list : {&peers_.members, &peers_.candidates}) {
    for (const Peer& peer : *list) {
      const PeerId& id = peer.member.id;
      if (name == peer.member.name || name == id.hex() || name == id.brief() ||
          name == wire::shown_name(peer.member.name, id, false))
        found.emplace_back(id, peers_.named(id));
    }
  }
  return found;
}

void Group::kick(const PeerId& id, Instant now) {
  const std::string reason = "kicked by the operator";
  if (peers_.member(id) != nullptr) return remove({{id, Code::evicted, reason}}, now);
  for (const Peer& peer : peers_.candidates) {
    if (peer.member.id == id) return evict(peer.connection, Code::evicted, reason, now);
  }
}

bool Group::drain(const PeerId& id) {
  for (const std::vector<Peer>* list : {&peers_.members, &peers_.candidates}) {
    for (const Peer& peer : *list) {
      if (peer.member.id != id || peer.connection == 0) continue;
      around_.send(peer.connection, list == &peers_.members ? log_.collected() : 0, wire::Drain{});
      return true;
    }
  }
  return false;
}

void Group::admission_changed(Instant now) {
  newcomers_.admission_changed();
  around_.replicas().changed();
  retry_admission(now);
}

// -- departures

void Group::evict(ConnectionId connection, Code code, const std::string& reason, Instant now) {
  Peer* peer = peers_.on(connection);
  if (peer == nullptr) return;
  if (peers_.member(peer->member.id) == peer) {
    remove({{peer->member.id, code, reason}}, now);
    return;
  }
  newcomers_.peer_left(now);
  around_.send(connection, 0, wire::Refused{code, reason});
  around_.close(connection);
  const wire::Member gone = newcomers_.drop(*peer);
  around_.replicas().departed(id_, gone, reason, false, false);
}

void Group::remove(const std::vector<Departed>& departed, Instant now) {
  std::vector<wire::Departure> departures;
  std::vector<std::pair<ConnectionId, wire::Refused>> refusals;
  for (const Departed& gone : departed) {
    Peer* peer = peers_.member(gone.id);
    if (peer == nullptr) continue;
    const std::size_t left = peers_.members.size() - 1;
    const std::string name = peers_.shown(gone.id);
    context_.note("peer " + name + " is out: " + gone.reason + "; " + plural(left, "member") +
                      (left == 1 ? " goes on" : " go on"),
                  !gone.finished);
    if (peer->connection != 0)
      refusals.emplace_back(peer->connection, wire::Refused{gone.code, gone.reason});
    if (!gone.finished) ++evictions_;
    departures.push_back({gone.id, gone.reason, name});
    around_.replicas().departed(id_, peer->member, gone.reason, true, gone.finished);
    for (const Pair& pair : links_.drop_member(gone.id)) around_.end_relay(pair.first, pair.second);
    calls_.drop_member(gone.id);
    std::erase_if(peers_.members, [&](const Peer& other) { return other.member.id == gone.id; });
  }
  if (departures.empty()) return;
  newcomers_.peer_left(now);
  decisions_.lose(std::move(departures));
  // Several masters: these have a vote on the epoch that removes them.
  for (const auto& [connection, refused] : refusals) {
    around_.send(connection, log_.collected(), refused);
    around_.close(connection);
  }
  check_calls(now);
  start_if_ready(now);
}

void Group::on_disconnect(ConnectionId connection, Instant now) {
  Peer* peer = peers_.on(connection);
  if (peer == nullptr) return;
  if (!peers_.is_member(*peer)) {
    const wire::Member away = newcomers_.drop(*peer);
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
  // So long a gap is no wait of the members.
  const bool gap = last_tick_ != Instant{} && now - last_tick_ > 2 * options_.heartbeat_interval;
  last_tick_ = now;
  evict_silent(now);
  decisions_.check_plan(now);
  decisions_.reconsider_plan(now);
  evict_laggards(now);
  check_links(now);
  check_calls(now);
  call_rules_.check_stuck(now);
  call_rules_.notice_stragglers(now);
  remove(call_rules_.find_late(now, gap), now);
  remove(call_rules_.end_overdue(now), now);
}

void Group::check_calls(Instant now) {
  for (const wire::CallKey& key : calls_.keys()) check_call(key, now);
}

}  // namespace pccl::master
