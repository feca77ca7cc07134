#include "pccl/master/group.h"

#include <algorithm>
#include <utility>

#include "pccl/base/overloaded.h"
#include "pccl/base/text.h"
#include "pccl/digest/ticket.h"
#include "pccl/state/election.h"
#include "pccl/topology/choose.h"
#include "pccl/topology/plan.h"
#include "pccl/topology/rates.h"

namespace pccl::master {
namespace {

// Each kind of round has its kind of payload.
bool payload_fits(const wire::RoundEntry& entry) {
  switch (entry.key.kind) {
    case wire::RoundKind::sync:
      return std::holds_alternative<wire::SyncVote>(entry.payload);
    case wire::RoundKind::sync_detail:
      return std::holds_alternative<wire::SyncDetail>(entry.payload);
    case wire::RoundKind::sync_end:
      return std::holds_alternative<wire::SyncEnd>(entry.payload);
    case wire::RoundKind::admit:
    case wire::RoundKind::sync_admit:
      return std::holds_alternative<wire::AdmissionPoint>(entry.payload) ||
             std::holds_alternative<wire::Nothing>(entry.payload);
    case wire::RoundKind::optimize:  // who has measured nothing need not say so
      return std::holds_alternative<wire::Measurements>(entry.payload) ||
             std::holds_alternative<wire::Nothing>(entry.payload);
    default:
      return std::holds_alternative<wire::Nothing>(entry.payload);
  }
}

// About what a list of entries takes to be held.
std::uint64_t bytes_of(const wire::RoundPayload& payload) {
  if (const auto* row = std::get_if<wire::Measurements>(&payload))
    return row->links.size() * sizeof(wire::MeasuredLink);
  const auto* detail = std::get_if<wire::SyncDetail>(&payload);
  if (detail == nullptr) return 0;
  std::uint64_t bytes = 0;
  for (const wire::StateEntry& entry : detail->entries) {
    bytes += sizeof entry + entry.name.size() + entry.kind.size() + entry.containers.size() +
             entry.tie.size() + 8 * entry.shape.size();
  }
  return bytes;
}

// Messages that nothing else has a bound for, and how long their lists are.
std::optional<std::size_t> talk_in(const wire::Message& message) {
  using Items = std::optional<std::size_t>;
  return std::visit(
      Overloaded{[](const wire::Blocked& blocked) -> Items { return blocked.waits.size(); },
                 [](const wire::Neighbourhood& near) -> Items { return near.peers.size(); },
                 [](const wire::Measured& measured) -> Items { return measured.row.links.size(); },
                 [](const wire::Prepared& prepared) -> Items { return prepared.without.size(); },
                 // Calls are counted where they are known already.
                 [](const wire::OpReport& report) -> Items {
                   return report.states.empty() ? Items(0) : std::nullopt;
                 },
                 [](const wire::EnterRound&) -> Items { return std::nullopt; },
                 [](const auto&) -> Items { return 0; }},
      message);
}

// What it costs to come back, in items of lists, and for each entry of the log that is sent again.
constexpr std::size_t kComingBack = 1024;
constexpr std::size_t kMissedEntry = 4;
// Lists of entries of a state are counted in bytes. One entry has this many, and its name.
constexpr std::size_t kBytesOfItem = 64;

// What to do where two peers cannot reach each other.
constexpr const char* kOpenAPort =
    "open a port of one of the two (PCCL_PORT), and where it is not found at its own address name "
    "the other one (PCCL_ADVERTISE)";

std::string advice(const Options& options) {
  return std::string(kOpenAPort) + (options.relays ? "" : "; or let the master relay (PCCL_RELAY)");
}

constexpr std::size_t kShownOfSignature = 100;
// Peers that come within this time of each other were perhaps to start together.
constexpr Duration kTogether = std::chrono::seconds(10);
constexpr const char* kHowTogether =
    "Peers that are to start together wait for each other with min_peers (PCCL_MIN_PEERS, or `pccl "
    "master --min-peers N`)";

}  // namespace

// ---- looking things up
// --------------------------------------------------------------------------------------------

Group::Peer* Group::member(const PeerId& id) {
  const auto it = std::find_if(members_.begin(), members_.end(),
                               [&](const Peer& peer) { return peer.member.id == id; });
  return it == members_.end() ? nullptr : &*it;
}

Group::Peer* Group::by_connection(ConnectionId connection) {
  for (auto* list : {&members_, &candidates_}) {
    for (Peer& peer : *list) {
      if (peer.connection == connection) return &peer;
    }
  }
  return nullptr;
}

std::vector<PeerId> Group::ask_members(const wire::Try& question, std::size_t most,
                                       const std::function<bool(ConnectionId)>& fit) {
  std::vector<PeerId> asked;
  for (const Peer& peer : members_) {
    if (asked.size() >= most) break;
    if (peer.connection == 0 || !fit(peer.connection)) continue;
    around_.send(peer.connection, collected_, question);
    asked.push_back(peer.member.id);
  }
  return asked;
}

PeerId Group::member_on(ConnectionId connection) const {
  for (const Peer& peer : members_)
    if (peer.connection == connection) return peer.member.id;
  return {};
}

bool Group::knows(ConnectionId connection) const {
  return const_cast<Group*>(this)->by_connection(connection) != nullptr;
}

std::size_t Group::rank_of(const PeerId& id) const {
  for (std::size_t rank = 0; rank < members_.size(); ++rank) {
    if (members_[rank].member.id == id) return rank;
  }
  return members_.size();
}

bool Group::decided_beyond(const wire::CallKey& key, std::uint64_t applied) const {
  const auto it = decided_.find(key);
  return it != decided_.end() && it->second > applied;
}

bool Group::entered_by_all(const wire::CallKey& key) const {
  if (const auto* op = std::get_if<wire::OpKey>(&key)) {
    const auto it = operations_.find(*op);
    return it != operations_.end() && it->second.entries.size() == members_.size();
  }
  const auto it = rounds_.find(std::get<wire::RoundKey>(key));
  return it != rounds_.end() && it->second.entered.size() == members_.size();
}

// A member is in one sync at a time; and there is an end to what all of them may tell of theirs.
bool Group::too_much(const PeerId& from, const wire::RoundEntry& entry) const {
  if (std::holds_alternative<wire::Nothing>(entry.payload)) return false;
  std::uint64_t bytes = bytes_of(entry.payload);
  for (const auto& [key, round] : rounds_) {
    bytes += round.bytes;
    if (key.kind == entry.key.kind && key != entry.key && round.entered.contains(from)) return true;
  }
  return bytes > options_.max_open_bytes;
}

// Who has entered the most calls that are open. Too many of them are its doing: the others' are in
// there, too, and are fewer.
PeerId Group::busiest() const {
  std::map<PeerId, std::size_t> counts;
  for (const auto& [key, operation] : operations_)
    for (const auto& [id, entry] : operation.entries) ++counts[id];
  for (const auto& [key, round] : rounds_)
    for (const auto& [id, payload] : round.entered) ++counts[id];
  const auto most =
      std::max_element(counts.begin(), counts.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == counts.end() ? PeerId{} : most->first;
}

void Group::evict_busiest(Instant now) {
  remove({{busiest(), Code::evicted, "protocol misuse: it has too many calls open"}}, now);
}

// Something that can be said in good faith now and then, by who has not heard yet what happened.
// True when it was once too often: the peer is out.
bool Group::stray(Peer& from, const char* what, Instant now) {
  if (from.strays.take(options_.strays, now)) return false;
  evict(from.connection, Code::evicted, std::string("protocol misuse: too many ") + what, now);
  return true;
}

// Who says so much that the master has no time for the others is out, too. A message counts as one,
// and one more for every 16 items of its list.
bool Group::floods(Peer& from, std::size_t items, Instant now) {
  if (from.talk.take(options_.talk, now, 1 + static_cast<double>(items) / 16)) return false;
  evict(from.connection, Code::evicted, "protocol misuse: it floods the master", now);
  return true;
}

bool Group::hurried() const {
  if (!trouble_.empty() || stuck_since_) return true;
  return std::any_of(operations_.begin(), operations_.end(),
                     [](const auto& item) { return item.second.mismatch_since.has_value(); });
}

std::string Group::summary() const {
  std::string text = "epoch " + std::to_string(record_.epoch) + " members";
  for (const Peer& peer : members_) text += " " + peer.member.id.brief();
  for (const auto& [key, operation] : operations_) {
    text += "\n" + wire::describe(key) + ":";
    for (const auto& [id, entry] : operation.entries)
      text += " " + id.brief() + (entry.done ? "+" : "");
  }
  for (const auto& [key, round] : rounds_) {
    text += "\n" + wire::describe(key) + ":";
    for (const auto& [id, payload] : round.entered) text += " " + id.brief();
  }
  return text;
}

std::vector<std::pair<wire::CallKey, PeerId>> Group::open_entries() const {
  std::vector<std::pair<wire::CallKey, PeerId>> open;
  for (const auto& [key, operation] : operations_)
    for (const auto& [id, entry] : operation.entries) open.emplace_back(key, id);
  for (const auto& [key, round] : rounds_)
    for (const auto& [id, payload] : round.entered) open.emplace_back(key, id);
  return open;
}

// ---- the log
// ------------------------------------------------------------------------------------------------------

void Group::append(std::variant<wire::EpochRecord, wire::Verdict, wire::Outcome> what) {
  wire::LogEntry entry{++last_ordinal_, std::move(what)};
  wire::Log message{{entry}};
  for (const Peer& peer : members_) {
    if (peer.connection != 0) around_.send(peer.connection, collected_, message);
  }
  log_.push_back(std::move(entry));
}

void Group::advance_collected() {
  std::uint64_t least = last_ordinal_;
  for (const Peer& peer : members_) least = std::min(least, peer.applied);
  if (least <= collected_) return;
  collected_ = least;
  while (!log_.empty() && log_.front().ordinal <= collected_) log_.pop_front();
  std::erase_if(decided_, [&](const auto& item) { return item.second <= collected_; });
}

// All others keep the log for who does not apply it.
void Group::evict_laggards(Instant now) {
  if (log_.size() <= options_.max_behind) return;
  std::vector<Departed> gone;
  for (const Peer& peer : members_) {
    if (last_ordinal_ - peer.applied > options_.max_behind)
      gone.push_back({peer.member.id, Code::evicted, "it does not follow the group's log"});
  }
  if (!gone.empty()) remove(gone, now);
}

// Ends a call for every member, also for those that enter it later.
void Group::decide(const wire::CallKey& key, Code code, const PeerId& culprit,
                   const std::string& reason, const std::string& waiting,
                   const wire::SyncDecision& sync) {
  if (const auto* op = std::get_if<wire::OpKey>(&key)) {
    const bool come_here = code == Code::ok && (newcomers_ready() || measuring_helps());
    append(wire::Verdict{*op, record_.epoch, code, come_here, culprit, reason, waiting});
    operations_.erase(*op);
  } else {
    const auto& round = std::get<wire::RoundKey>(key);
    const bool yes = round.kind == wire::RoundKind::peers_pending
                         ? newcomers_ready()
                         : code == Code::ok && measure_at(round);
    const wire::Outcome outcome{round,   code,   yes ? 1U : 0U, around_.census(),
                                culprit, reason, waiting,       sync};
    append(outcome);
    wire::apply(outcome, record_);
    rounds_.erase(round);
  }
  decided_[key] = last_ordinal_;
}

std::vector<PeerId> Group::member_ids() const {
  std::vector<PeerId> ids;
  for (const Peer& peer : members_) ids.push_back(peer.member.id);
  return ids;
}

std::set<topology::Edge> Group::ranks_of(const std::set<std::pair<PeerId, PeerId>>& pairs) const {
  std::set<topology::Edge> edges;
  for (const auto& [a, b] : pairs) {
    const auto first = static_cast<std::uint32_t>(rank_of(a));
    const auto second = static_cast<std::uint32_t>(rank_of(b));
    if (first < members_.size() && second < members_.size())
      edges.insert(std::minmax(first, second));
  }
  return edges;
}

// The best plan for what is known at present. Links are relayed only where there is no other.
std::optional<Group::Draft> Group::draft_plan() {
  std::vector<PeerId> before;
  for (const wire::Member& known : record_.members) before.push_back(known.id);
  topology::Situation present{static_cast<std::uint32_t>(members_.size()),
                              options_.segment_bytes,
                              ranks_of(unusable_),
                              present_hosts(),
                              topology::carried(rates_, before, member_ids()),
                              options_.thresholds};
  auto choice = topology::choose(present);
  std::set<topology::Edge> relayed;
  const std::set<topology::Edge> never = ranks_of(unrelayable_);
  const std::set<topology::Edge> unusable = present.unusable;
  if (!choice && options_.relays) {
    relayed =
        topology::detours(present.world, unusable, never, options_.max_relayed, present.hosts);
    for (const topology::Edge& pair : relayed) present.unusable.erase(pair);
    choice = topology::choose(present);
  }
  if (!choice) return std::nullopt;
  Draft draft{std::move(*choice), std::move(present.rates), {}};
  if (!options_.relays) return draft;
  // What moves beside the plan, as shared state does, may need others of them.
  for (const topology::Edge& pair : unusable) {
    if (relayed.size() >= options_.max_relayed) break;
    if (!never.contains(pair)) relayed.insert(pair);
  }
  for (const auto& [a, b] : relayed) draft.relayed.push_back({a, b});
  return draft;
}

void Group::take_plan(Draft draft) {
  const std::string& why = draft.choice.why;
  if (!why.empty()) around_.log("group " + std::to_string(id_) + ": plan: " + why);
  record_.plan = std::move(draft.choice.plan);
  record_.rates = rates_ = std::move(draft.rates);
  record_.relayed = std::move(draft.relayed);
  rates_moved_ = false;
  hosts_differ_since_.reset();
}

bool Group::plan_epoch() {
  hosts_.reset();
  auto draft = draft_plan();
  if (!draft) return false;
  take_plan(std::move(*draft));
  return true;
}

// As plan_epoch would find, were these the members.
bool Group::has_plan(std::size_t world, const std::set<topology::Edge>& unusable,
                     const std::set<topology::Edge>& unrelayable) const {
  return topology::plannable(static_cast<std::uint32_t>(world), unusable, unrelayable,
                             options_.relays ? options_.max_relayed : 0);
}

std::set<std::pair<PeerId, PeerId>> Group::relayed_pairs() const {
  std::set<std::pair<PeerId, PeerId>> pairs;
  for (const auto& [a, b] : record_.relayed)
    pairs.insert(std::minmax(record_.members[a].id, record_.members[b].id));
  return pairs;
}

// Transfers have shown something new. Operations under way would start over in another plan, and a
// long one perhaps again and again: so only between operations.
void Group::reconsider_plan(Instant now) {
  // Nor while links are down: what is reported of them counts from the beginning of an epoch.
  if (!rates_moved_ || members_.empty() || !operations_.empty() || !trouble_.empty()) return;
  if (now - reconsidered_ < options_.replan_interval) return;
  reconsidered_ = now;
  auto draft = draft_plan();
  // What is better once may be chance; a plan has to be better at two moments.
  const bool better =
      draft && topology::worth_changing(record_.plan, draft->choice.plan, draft->rates);
  rates_moved_ = better;
  if (!std::exchange(better_plan_, better) || !better) return;
  better_plan_ = false;
  take_plan(std::move(*draft));
  start_over(wire::Cause::plan, {}, {});
}

// Computed once for what is known at present: all pairs are looked at.
const std::vector<std::uint32_t>& Group::present_hosts() {
  if (hosts_) return *hosts_;
  std::set<topology::Edge> shared;
  for (std::uint32_t b = 0; b < members_.size(); ++b) {
    for (std::uint32_t a = 0; a < b; ++a) {
      if (members_[a].shares_with.contains(members_[b].member.id) &&
          members_[b].shares_with.contains(members_[a].member.id)) {
        shared.insert({a, b});
      }
    }
  }
  return hosts_.emplace(topology::hosts(static_cast<std::uint32_t>(members_.size()), shared));
}

// Nobody still finds out, or is away, who shares memory.
bool Group::sharing_settled() const {
  return std::all_of(members_.begin(), members_.end(), [](const Peer& peer) {
    return peer.sharing_pending == 0 && peer.connection != 0;
  });
}

// Who shares memory is known only a moment after the group has started, and may end.
void Group::replan_hosts(Instant now) {
  if (members_.empty() || present_hosts() == record_.plan.hosts) {
    hosts_differ_since_.reset();
    return;
  }
  if (!hosts_differ_since_) hosts_differ_since_ = now;
  if (!sharing_settled() && now - *hosts_differ_since_ < options_.heartbeat_interval) return;
  if (!plan_epoch()) return;
  around_.log("group " + std::to_string(id_) + ": planned for who shares memory");
  start_over(wire::Cause::plan, {}, {});
}

// An epoch in which the operations under way run again from the start, but for `aborted`.
void Group::start_over(wire::Cause cause, std::vector<wire::Departure> departures,
                       const std::vector<wire::OpKey>& aborted) {
  for (const wire::OpKey& key : aborted) operations_.erase(key);
  for (auto& [key, operation] : operations_) {
    for (auto& [id, entry] : operation.entries) entry.done = false;
    operation.mismatch_since.reset();
    operation.met.reset();
  }
  begin_epoch(cause, std::move(departures), aborted);
  for (const wire::OpKey& key : aborted) decided_[key] = last_ordinal_;
}

// The present members_, as a new epoch. REQUIRES: plan_epoch() succeeded for them, or there are
// none.
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
  for (const Peer& peer : members_) record_.members.push_back(peer.member);
  record_.ranks_per_replica = ranks_;
  std::erase_if(record_.state.holders, [&](const PeerId& id) { return member(id) == nullptr; });
  record_.census = around_.census();
  record_.departures = std::move(departures);
  record_.aborted = std::move(aborted);
  if (members_.empty()) record_.relayed.clear();
  append(record_);
  const std::set<std::pair<PeerId, PeerId>> relayed = relayed_pairs();
  std::erase_if(wanted_, [&](const auto& pair) {
    if (relayed.contains(pair)) return false;
    around_.end_relay(pair.first, pair.second);
    return true;
  });
  // Members report anew what is still so.
  for (auto& [pair, trouble] : trouble_) trouble.late = true;
  unavoidable_.clear();
  stuck_since_.reset();
  tell_newcomers();
}

// ---- joining
// ------------------------------------------------------------------------------------------------------

void Group::add_candidate(ConnectionId connection, const wire::Join& join, const std::string& seen,
                          Instant now) {
  const auto refuse = [&](const std::string& reason) {
    around_.send(connection, 0, wire::Refused{Code::refused, reason});
    around_.close(connection);
  };
  const PeerId seal = digest::seal_of(join.ticket);
  if (let_in_again(connection, join, seal, now)) return;
  if (members_.size() + candidates_.size() >= options_.max_peers) {
    return refuse("group " + std::to_string(id_) + " is full (" +
                  plural(options_.max_peers, "peer") + ")");
  }
  const bool taken = std::any_of(candidates_.begin(), candidates_.end(), [&](const Peer& other) {
    return other.member.id == join.id && other.member.seal != seal;
  });
  if (join.id.empty() || member(join.id) != nullptr || taken)
    return refuse("peer id " + join.id.brief() + " is in use");
  std::size_t address_bytes = 0;
  for (const wire::Address& address : join.addresses) address_bytes += address.host.size();
  // (Ours of it is in there, too.)
  if (join.addresses.size() > options_.max_addresses + 1 ||
      address_bytes > options_.max_address_bytes) {
    return refuse("a peer has at most " + plural(options_.max_addresses, "address", "es") + " of " +
                  plural(options_.max_address_bytes, "byte") + " in all");
  }
  // A newcomer whose connection broke comes again before we noticed: the new one counts.
  for (const Peer& candidate : candidates_) {
    if (candidate.member.id == join.id) around_.close(candidate.connection);
  }
  std::erase_if(candidates_, [&](const Peer& candidate) { return candidate.member.id == join.id; });
  if (empty()) ranks_ = join.ranks_per_replica;
  const bool started = ranks_ > 0 ? around_.replicas_started() : !members_.empty();
  Peer peer;
  peer.member = {join.id, around_.next_join_ordinal(), join.addresses, join.word, join.replica,
                 seal};
  peer.connection = connection;
  peer.heard = now;
  peer.min_peers = std::max(1U, join.min_peers);
  peer.order = join.order;
  peer.waiting = join.waiting && !(join.start_only && started);
  peer.start_only = join.start_only;
  peer.seen = seen;
  candidates_.push_back(std::move(peer));
  around_.send(
      connection, 0,
      wire::Welcome{candidates_.back().member.joined, started, started ? 0 : missing(), seen});
  if (!members_.empty()) {
    tell_newcomers();
    tell_lone_founder(now);
  } else {
    start_if_ready(now);
  }
  tell_namesake(connection);
}

// Two replicas of one name are mistaken for one that was restarted.
void Group::tell_namesake(ConnectionId connection) {
  const Peer* peer = by_connection(connection);
  if (peer == nullptr || peer->member.replica.empty()) return;
  const auto has_name = [&](const Peer& other) {
    return other.member.replica == peer->member.replica && other.member.id != peer->member.id;
  };
  if (std::none_of(members_.begin(), members_.end(), has_name) &&
      std::none_of(candidates_.begin(), candidates_.end(), has_name))
    return;
  around_.send(connection, 0,
               wire::Notice{"another peer is rank " + std::to_string(id_) +
                            " of a replica named \"" + peer->member.replica +
                            "\" already: this one waits until that one has gone; two replicas "
                            "need two names"});
}

// A peer that was to start together with others has started alone, since it does not wait for them.
void Group::tell_lone_founder(Instant now) {
  if (!alone_since_ || members_.size() != 1 || now - *alone_since_ >= kTogether) return;
  alone_since_.reset();
  around_.send(
      members_.front().connection, collected_,
      wire::Notice{
          "this peer has started group " + std::to_string(id_) +
          " alone, and another one has come since: it is let in at pccl.admit() or pccl.sync(). " +
          kHowTogether});
}

// A newcomer's connection broke as it was let in: it has not heard of its admission, and joins once
// more. Its log begins there.
bool Group::let_in_again(ConnectionId connection, const wire::Join& join, const PeerId& seal,
                         Instant now) {
  Peer* peer = member(join.id);
  if (peer == nullptr || peer->member.seal != seal) return false;
  const auto admission = std::find_if(log_.begin(), log_.end(), [&](const wire::LogEntry& entry) {
    const auto* record = std::get_if<wire::EpochRecord>(&entry.what);
    return record != nullptr && record->cause == wire::Cause::admission &&
           std::any_of(record->members.begin(), record->members.end(),
                       [&](const wire::Member& known) { return known.id == join.id; });
  });
  if (admission == log_.end() || admission->ordinal <= peer->applied) return false;
  if (peer->connection != 0) around_.close(peer->connection);
  peer->connection = connection;
  peer->returned = true;
  peer->heard = now;
  if (floods(*peer, kComingBack, now)) return true;
  around_.send(connection, 0, wire::Welcome{peer->member.joined, true, 0, peer->seen});
  send_log(*peer, admission->ordinal - 1);
  around_.send(connection, collected_, expected());
  return true;
}

// The entries that it has missed.
void Group::send_log(const Peer& to, std::uint64_t after) {
  std::vector<wire::LogEntry> missing;
  for (const wire::LogEntry& entry : log_) {
    if (entry.ordinal > after) missing.push_back(entry);
  }
  for (auto& part : wire::in_parts(std::move(missing)))
    around_.send(to.connection, collected_, wire::Log{std::move(part)});
}

// Peers that are still to come before the group can start; of replicas: those.
std::uint32_t Group::missing() const {
  if (ranks_ > 0) return around_.replicas_missing();
  std::uint32_t wanted = options_.min_peers;
  std::uint32_t present = 0;
  for (const Peer& candidate : candidates_) {
    if (!candidate.waiting) continue;
    ++present;
    wanted = std::max(wanted, candidate.min_peers);
  }
  return wanted > present ? wanted - present : 0;
}

Group::Peer Group::take_candidate(std::size_t at) {
  Peer peer = std::move(candidates_[at]);
  candidates_.erase(candidates_.begin() + static_cast<std::ptrdiff_t>(at));
  peer.applied = last_ordinal_;
  return peer;
}

// Until a group has members, those who wait form it as soon as the largest min_peers among them is
// reached.
void Group::start_if_ready(Instant now) {
  if (ranks_ > 0) return around_.replicas_changed();
  const bool somebody = std::any_of(candidates_.begin(), candidates_.end(),
                                    [](const Peer& candidate) { return candidate.waiting; });
  if (!members_.empty() || !somebody || missing() > 0) return;
  std::vector<Peer> founders;
  for (std::size_t at = 0; at < candidates_.size();) {
    if (candidates_[at].waiting) {
      founders.push_back(take_candidate(at));
    } else {
      ++at;
    }
  }
  std::stable_sort(founders.begin(), founders.end(),
                   [](const Peer& a, const Peer& b) { return a.order < b.order; });
  start(std::move(founders));
  // Level 1's founders always start so, and let each other in.
  if (members_.size() != 1 || !members_.front().start_only) return alone_since_.reset();
  alone_since_ = now;
  if (!others_at_ || now - *others_at_ >= kTogether) return;
  around_.send(members_.front().connection, collected_,
               wire::Notice{"this peer has started group " + std::to_string(id_) +
                            " alone, and another one was there just before. " + kHowTogether});
}

void Group::start(std::vector<Peer> founders) {
  slow_ = false;
  operations_.clear();
  rounds_.clear();
  log_.clear();
  decided_.clear();
  trouble_.clear();
  breaks_.clear();
  unusable_.clear();
  unrelayable_.clear();
  collected_ = last_ordinal_;
  record_.state = {};
  record_.syncing = false;
  record_.rates = rates_ = {};
  record_.point_open = false;
  members_ = std::move(founders);
  plan_epoch();
  around_.log("group " + std::to_string(id_) + ": started with " + plural(members_.size(), "peer"));
  begin_epoch(wire::Cause::admission, {}, {});
}

bool Group::newcomer_ready(const Peer& candidate) const {
  return candidate.waiting && candidate.connection != 0 &&
         candidate.prepared_epoch == record_.epoch;
}

// There is a plan with it that does without the links which it cannot make.
bool Group::fits(const Peer& candidate) const {
  if (candidate.unreachable.empty()) return true;
  std::set<topology::Edge> edges = ranks_of(unusable_);
  const auto own = static_cast<std::uint32_t>(members_.size());
  for (const PeerId& id : candidate.unreachable) {
    const auto rank = static_cast<std::uint32_t>(rank_of(id));
    if (rank < own) edges.insert({rank, own});
  }
  return has_plan(members_.size() + 1, edges, ranks_of(unrelayable_));
}

bool Group::newcomers_ready() const {
  if (ranks_ > 0)
    return around_.replicas_wait(id_, wire::next_point(record_, wire::RoundKind::admit));
  return std::any_of(candidates_.begin(), candidates_.end(),
                     [&](const Peer& candidate) { return newcomer_ready(candidate); });
}

wire::Expect Group::expected() const {
  wire::Expect expect;
  for (const Peer& candidate : candidates_) {
    if (!candidate.waiting) continue;
    expect.newcomers.push_back(candidate.member);
  }
  expect.ready = newcomers_ready();
  return expect;
}

// Newcomers learn whom to dial, members whom to expect.
void Group::tell_newcomers() {
  if (members_.empty()) return;
  const wire::Expect expect = expected();
  // Members first: whoever is dialled should know why.
  for (const Peer& peer : members_) {
    if (peer.connection != 0) around_.send(peer.connection, collected_, expect);
  }
  const wire::Prepare prepare{record_.epoch, record_.members};
  for (const Peer& candidate : candidates_) {
    if (candidate.waiting && candidate.prepared_epoch != record_.epoch) {
      around_.send(candidate.connection, 0, prepare);
    }
  }
}

// A member may hold decisions of the master before us that none of the others had reported when the
// group was brought back. They stand, as long as we have decided nothing else since. False when
// they cannot.
bool Group::adopt(const std::vector<wire::LogEntry>& log, std::uint64_t applied) {
  std::uint64_t next = last_ordinal_ + 1;
  for (const wire::LogEntry& entry : log) {
    if (entry.ordinal < next) continue;
    if (entry.ordinal != next++ || std::holds_alternative<wire::EpochRecord>(entry.what))
      return false;
  }
  if (next != applied + 1) return false;
  for (const wire::LogEntry& entry : log) {
    if (entry.ordinal <= last_ordinal_) continue;
    append(entry.what);
    std::visit(Overloaded{[](const wire::EpochRecord&) {},
                          [&](const wire::Verdict& verdict) {
                            operations_.erase(verdict.key);
                            decided_[verdict.key] = last_ordinal_;
                          },
                          [&](const wire::Outcome& outcome) {
                            wire::apply(outcome, record_);
                            rounds_.erase(outcome.key);
                            decided_[outcome.key] = last_ordinal_;
                          }},
               entry.what);
  }
  rebuilt_at_ = last_ordinal_;
  return true;
}

Group::Return Group::rejoin(ConnectionId connection, const wire::Rejoin& rejoin,
                            const std::vector<wire::LogEntry>* log, Instant now) {
  Peer* peer = member(rejoin.id);
  // Who only knows its id takes nobody's place.
  if (peer == nullptr || peer->member.seal != digest::seal_of(rejoin.ticket)) return Return::out;
  // The entries that it has missed are kept no more.
  if (rejoin.applied < collected_) return Return::out;
  if (rejoin.applied > last_ordinal_) {
    if (last_ordinal_ != rebuilt_at_ || rejoin.record.epoch != record_.epoch) return Return::out;
    if (log == nullptr) return Return::needs_log;
    if (!adopt(*log, rejoin.applied)) return Return::out;
  }
  if (peer->connection != 0) around_.close(peer->connection);
  peer->connection = connection;
  peer->returned = true;
  peer->heard = now;
  peer->blocked = {};
  // Its report replaces what we knew: messages that it has not applied are sent again, and it
  // repeats its open calls.
  peer->applied = std::max(peer->applied, rejoin.applied);
  if (floods(*peer, kComingBack + kMissedEntry * (last_ordinal_ - rejoin.applied), now))
    return Return::in;
  around_.send(connection, collected_, wire::Welcome{peer->member.joined, true, 0, {}});
  send_log(*peer, rejoin.applied);
  // They may have come, or gone, meanwhile.
  around_.send(connection, collected_, expected());
  return Return::in;
}

Group Group::rebuild(std::uint32_t id, const Options& options, Surroundings& around,
                     const std::vector<Returned>& reports, const std::vector<wire::LogEntry>& log,
                     Instant now) {
  Group group(id, options, around);
  const Returned& best = newest(reports);
  group.record_ = best.rejoin().record;
  group.ranks_ = group.record_.ranks_per_replica;
  const std::size_t n = group.record_.members.size();
  const wire::RateTable& told = group.record_.rates;
  if (told.hosts.size() != n || told.links.size() != n * n) group.record_.rates = {};
  group.rates_ = group.record_.rates;
  const std::uint64_t last = best.at().second;
  group.last_ordinal_ = last;
  group.rebuilt_at_ = last;
  // All that any member misses is in there: what is not was applied by all.
  group.collected_ = last - log.size();
  for (const wire::LogEntry& entry : log) {
    std::visit(
        Overloaded{[&](const wire::EpochRecord& record) {
                     for (const wire::OpKey& key : record.aborted)
                       group.decided_[key] = entry.ordinal;
                   },
                   [&](const auto& decision) { group.decided_[decision.key] = entry.ordinal; }},
        entry.what);
    group.log_.push_back(entry);
  }
  for (const wire::Member& member : group.record_.members) {
    Peer peer;
    peer.member = member;
    peer.heard = now;
    peer.disconnected_at = now;
    peer.applied = group.collected_;
    peer.returned = false;
    group.members_.push_back(std::move(peer));
  }
  // Who shared memory does so still; who has lost it says so.
  const std::vector<std::uint32_t>& hosts = group.record_.plan.hosts;
  for (std::size_t a = 0; a < hosts.size() && a < group.members_.size(); ++a) {
    for (std::size_t b = 0; b < hosts.size() && b < group.members_.size(); ++b) {
      if (a != b && hosts[a] == hosts[b])
        group.members_[a].shares_with.insert(group.members_[b].member.id);
    }
  }
  group.unusable_ = group.relayed_pairs();
  for (const Returned& one : reports) {
    if (group.rejoin(one.connection(), one.rejoin(), nullptr, now) == Return::in) continue;
    around.send(one.connection(), 0,
                wire::Refused{Code::evicted, "the run went on without this peer"});
    around.close(one.connection());
  }
  return group;
}

// ---- replicas
// -----------------------------------------------------------------------------------------------------

std::vector<RankStanding> Group::ranks() const {
  std::vector<RankStanding> ranks;
  if (ranks_ == 0) return ranks;
  for (const Peer& peer : members_) ranks.push_back({peer.member, 1, true, false, false});
  for (const Peer& peer : candidates_) {
    ranks.push_back({peer.member, peer.min_peers, false, peer.waiting, newcomer_ready(peer)});
  }
  return ranks;
}

bool Group::busy(const PeerId& id) const {
  if (members_.size() == 1) return false;  // what it was in ended with the others
  return std::any_of(operations_.begin(), operations_.end(),
                     [&](const auto& item) { return item.second.entries.contains(id); }) ||
         std::any_of(rounds_.begin(), rounds_.end(),
                     [&](const auto& item) { return item.second.entered.contains(id); });
}

void Group::start_with(const std::vector<std::string>& replicas, std::uint64_t points) {
  std::vector<Peer> founders;
  for (const std::string& replica : replicas) {
    const auto first =
        std::find_if(candidates_.begin(), candidates_.end(), [&](const Peer& candidate) {
          return candidate.waiting && candidate.member.replica == replica;
        });
    if (first == candidates_.end()) continue;
    founders.push_back(take_candidate(static_cast<std::size_t>(first - candidates_.begin())));
  }
  record_.points = points;
  start(std::move(founders));
}

void Group::leave_behind() {
  for (Peer& candidate : candidates_) {
    if (!candidate.waiting || !candidate.start_only) continue;
    candidate.waiting = false;
    around_.send(candidate.connection, 0,
                 wire::Welcome{candidate.member.joined, true, 0, candidate.seen});
  }
}

void Group::retry_admission(Instant now) {
  std::vector<wire::RoundKey> keys;
  for (const auto& [key, round] : rounds_) {
    if (key.kind == wire::RoundKind::admit || key.kind == wire::RoundKind::sync_admit)
      keys.push_back(key);
  }
  for (const wire::RoundKey& key : keys) check_round(key, now);
}

void Group::evict_rank(const std::string& replica, bool members, bool newcomers,
                       const std::string& reason, Instant now) {
  std::vector<ConnectionId> waiting;
  for (const Peer& candidate : candidates_) {
    if (newcomers && candidate.member.replica == replica) waiting.push_back(candidate.connection);
  }
  for (const ConnectionId connection : waiting) evict(connection, Code::evicted, reason, now);
  std::vector<Departed> gone;
  for (const Peer& peer : members_) {
    if (members && peer.member.replica == replica)
      gone.push_back({peer.member.id, Code::evicted, reason});
  }
  if (!gone.empty()) remove(gone, now);
}

void Group::tell_rank(const std::string& replica, const std::string& text) {
  for (const Peer& candidate : candidates_) {
    if (candidate.member.replica == replica)
      around_.send(candidate.connection, 0, wire::Notice{text});
  }
}

// ---- leaving
// ------------------------------------------------------------------------------------------------------

void Group::evict(ConnectionId connection, Code code, const std::string& reason, Instant now) {
  Peer* peer = by_connection(connection);
  if (peer == nullptr) return;
  if (member(peer->member.id) == peer) {
    remove({{peer->member.id, code, reason}}, now);
    return;
  }
  others_at_ = now;
  around_.send(connection, 0, wire::Refused{code, reason});
  around_.close(connection);
  const wire::Member gone = peer->member;
  std::erase_if(candidates_,
                [&](const Peer& candidate) { return candidate.connection == connection; });
  tell_newcomers();
  around_.rank_departed(id_, gone, reason, false, false);
}

void Group::remove(const std::vector<Departed>& departed, Instant now) {
  std::vector<wire::Departure> departures;
  for (const Departed& gone : departed) {
    Peer* peer = member(gone.id);
    if (peer == nullptr) continue;
    around_.log("group " + std::to_string(id_) + ": peer " + gone.id.brief() +
                " is out: " + gone.reason + "; " + plural(members_.size() - 1, "member") +
                (members_.size() == 2 ? " goes on" : " go on"));
    if (peer->connection != 0) {
      around_.send(peer->connection, collected_, wire::Refused{gone.code, gone.reason});
      around_.close(peer->connection);
    }
    departures.push_back({gone.id, gone.reason});
    around_.rank_departed(id_, peer->member, gone.reason, true, gone.finished);
    std::erase_if(trouble_, [&](const auto& item) {
      return item.first.first == gone.id || item.first.second == gone.id;
    });
    for (auto* pairs : {&unusable_, &unrelayable_}) {
      std::erase_if(*pairs, [&](const auto& pair) {
        return pair.first == gone.id || pair.second == gone.id;
      });
    }
    std::erase_if(breaks_, [&](const auto& item) {
      return item.first.first == gone.id || item.first.second == gone.id;
    });
    for (auto& [key, operation] : operations_) operation.entries.erase(gone.id);
    for (auto& [key, round] : rounds_) round.entered.erase(gone.id);
    std::erase_if(members_, [&](const Peer& other) { return other.member.id == gone.id; });
  }
  if (departures.empty()) return;
  others_at_ = now;
  while (!members_.empty() && !plan_epoch()) {
    // Without the departed no ring avoids the unusable links: try those links again rather than
    // evict for them.
    unusable_.clear();
    unrelayable_.clear();
  }
  std::vector<wire::OpKey> aborted;
  for (auto it = operations_.begin(); it != operations_.end();) {
    OpenOperation& operation = it->second;
    if (!operation.rerun && !members_.empty()) aborted.push_back(it->first);
    if (!operation.rerun || operation.entries.empty()) {
      it = operations_.erase(it);
      continue;
    }
    for (auto& [id, entry] : operation.entries) entry.done = false;
    operation.met.reset();
    operation.mismatch_since.reset();
    ++it;
  }
  std::erase_if(rounds_, [](const auto& item) { return item.second.entered.empty(); });
  begin_epoch(wire::Cause::loss, std::move(departures), aborted);
  for (const wire::OpKey& key : aborted) decided_[key] = last_ordinal_;
  advance_collected();
  check_calls(now);
  start_if_ready(now);
}

void Group::on_disconnect(ConnectionId connection, Instant now) {
  Peer* peer = by_connection(connection);
  if (peer == nullptr) return;
  if (member(peer->member.id) != peer) {
    const wire::Member away = peer->member;
    std::erase_if(candidates_,
                  [&](const Peer& candidate) { return candidate.connection == connection; });
    tell_newcomers();
    return around_.rank_away(id_, away, "its control connection broke");
  }
  peer->connection = 0;
  peer->disconnected_at = now;
  check_links(now);
}

// ---- messages of members and newcomers
// ----------------------------------------------------------------------------

void Group::on_message(ConnectionId from, const wire::Frame& frame, Instant now) {
  Peer* peer = by_connection(from);
  if (peer == nullptr) return;
  peer->heard = now;
  const bool is_member = member(peer->member.id) == peer;
  const std::uint64_t applied = frame.envelope.ordinal;
  if (is_member) {
    if (applied > last_ordinal_) {
      return evict(from, Code::evicted, "it claims to have seen decisions that were never made",
                   now);
    }
    if (applied > peer->applied) {
      peer->applied = applied;
      advance_collected();
    }
  }
  const PeerId id = peer->member.id;
  if (const auto items = talk_in(frame.message); items && floods(*peer, *items, now)) return;
  const auto misuse = [&](const char* what) {
    evict(from, Code::evicted, std::string("protocol misuse: ") + what, now);
  };
  std::visit(
      Overloaded{
          [&](const wire::Heartbeat&) {},
          // It was asked for it, and then another member that knows more was.
          [&](const wire::LogPart&) {},
          [&](const wire::Tried&) {},  // an answer to the master, not to the group
          [&](const wire::RequestAdmission&) {
            if (is_member || peer->waiting) return;
            if (!peer->turns.take(options_.turns, now)) return misuse("it cannot make up its mind");
            peer->waiting = true;
            peer->start_only = false;
            if (members_.empty()) {
              start_if_ready(now);
            } else {
              tell_newcomers();
              around_.replicas_changed();
            }
          },
          [&](const wire::WithdrawAdmission&) {
            if (is_member || !peer->waiting) return;
            peer->waiting = false;
            peer->prepared_epoch = 0;
            const wire::Member away = peer->member;
            tell_newcomers();
            around_.rank_away(id_, away, "it did not wait any longer");
          },
          [&](const wire::Prepared& prepared) {
            if (is_member) return;
            if (!peer->turns.take(options_.turns, now)) return misuse("it cannot make up its mind");
            const bool before = newcomers_ready();
            const std::set<PeerId> without(prepared.without.begin(), prepared.without.end());
            // What was not accepted as unreachable may come about yet, or be lost.
            if (!std::includes(peer->unreachable.begin(), peer->unreachable.end(), without.begin(),
                               without.end()))
              return;
            peer->unreachable = without;
            peer->prepared_epoch = prepared.epoch;
            if (newcomers_ready() != before) tell_newcomers();
            around_.replicas_changed();
          },
          [&](const wire::Neighbourhood& neighbourhood) {
            if (neighbourhood.peers.size() > options_.max_peers)
              return misuse("more neighbours than peers");
            const std::set<PeerId> before = std::exchange(
                peer->shares_with, {neighbourhood.peers.begin(), neighbourhood.peers.end()});
            const bool fewer = std::any_of(before.begin(), before.end(), [&](const PeerId& other) {
              return !peer->shares_with.contains(other) && member(other) != nullptr;
            });
            if (fewer && !peer->restarts.take(options_.restarts, now))
              return misuse("its neighbours come and go");
            peer->sharing_pending = neighbourhood.pending;
            if (!is_member) return;
            hosts_.reset();
            // While others are still finding out, a tick will do.
            if (sharing_settled()) replan_hosts(now);
          },
          [&](const wire::Measured& measured) {
            if (!is_member) return;
            if (measured.row.links.size() > options_.max_peers)
              return misuse("more links than peers");
            topology::merge(rates_, member_ids(), rank_of(id), measured.row);
            rates_moved_ = rates_ != record_.rates;
          },
          [&](const wire::EnterRound& enter) {
            if (!is_member) return misuse("a newcomer entered a round");
            if (!payload_fits(enter.entry)) return misuse("a round entered with the wrong payload");
            if (enter.entry.key.admission != record_.admission &&
                stray(*peer, "rounds of other admissions", now))
              return;
            on_round(id, enter.entry, applied, now);
          },
          [&](const wire::OpReport& report) {
            if (!is_member) return misuse("a newcomer entered an operation");
            for (const wire::OpState& state : report.states) {
              Peer* sender = member(id);
              if (sender == nullptr) return;
              on_operation(*sender, state, applied, now);
            }
            reconsider_plan(now);  // a program that reduces all the time has no other pause
          },
          [&](const wire::AbortRequest& request) {
            if (!is_member) return;
            if (decided_beyond(request.key, applied)) return;
            const std::uint64_t admission =
                std::visit([](const auto& key) { return key.admission; }, request.key);
            if (admission != record_.admission) {
              (void)stray(*peer, "calls of other admissions given up", now);
              return;
            }
            if (!peer->aborts.take(options_.aborts, now))
              return misuse("it gives up too many calls");
            const std::string who = named(id);
            if (request.code == Code::peer_lost) {
              const bool gone = !request.lost.empty() && member(request.lost) == nullptr;
              const PeerId lost = gone ? request.lost : PeerId{};
              const std::string whom = gone ? named(lost) : "a member";
              decide(request.key, Code::peer_lost, lost,
                     whom + " was lost before " + wire::describe(request.key) + " was complete",
                     {});
            } else if (request.code == Code::interrupted) {
              decide(request.key, Code::peer_lost, id,
                     who + " was interrupted in " + wire::describe(request.key), {});
            } else {
              decide(request.key, Code::timeout, id,
                     "the deadline of " + who + " passed in " + wire::describe(request.key), {});
            }
          },
          [&](const wire::LinkReport& report) {
            if (!is_member) {
              const Peer* about = member(report.peer);
              if (about == nullptr) return;
              // Nobody else is there to say so: it is the one that is gone.
              const bool cut_off = about->connection == 0;
              if (cut_off && members_.size() == 1 && report.state == wire::LinkState::unreachable) {
                remove({{report.peer, Code::evicted, "connection lost (" + report.reason + ")"}},
                       now);
                return;
              }
              // If the member is silent to us as well, it may be the one that is gone: the newcomer
              // goes on dialling, and reports again.
              if (report.state != wire::LinkState::unreachable || !peer->waiting ||
                  silent(*about, now))
                return;
              // Where the plan can do without that link, it may come in all the same. Else it must
              // not, and be a loss to everybody a moment later.
              peer->unreachable.insert(report.peer);
              if (!fits(*peer)) {
                evict(from, Code::unreachable,
                      "it cannot reach peer " + report.peer.brief() + " (" + report.reason +
                          "), nor is it reached from there, and no plan does without that: " +
                          advice(options_),
                      now);
              }
              return;
            }
            if (member(report.peer) == nullptr || report.peer == id) {
              const bool newcomer = std::any_of(
                  candidates_.begin(), candidates_.end(),
                  [&](const Peer& candidate) { return candidate.member.id == report.peer; });
              if (!newcomer) (void)stray(*peer, "reports about links to nobody", now);
              return;
            }
            if (report.state == wire::LinkState::mended ||
                report.state == wire::LinkState::relayed) {
              return on_mended({id, report.peer}, report.state == wire::LinkState::relayed, now);
            }
            LinkTrouble& trouble = trouble_[{id, report.peer}];
            // Said before it had heard of this epoch, as when two are killed at once.
            const bool late = report.epoch != record_.epoch;
            if (late && !trouble.reason.empty()) return;
            if (trouble.late) trouble = {};
            trouble.late = late;
            if (trouble.since == Instant{}) trouble.since = now;
            trouble.broke = trouble.broke || report.state == wire::LinkState::broken;
            // Unreachable and silent do not fall back to broken, but end when it is mended.
            if (trouble.reason.empty() || report.state != wire::LinkState::broken) {
              if (trouble.state == wire::LinkState::broken &&
                  report.state != wire::LinkState::broken) {
                trouble.since = now;
              }
              trouble.state = report.state;
              trouble.reason = report.reason.empty() ? "no reason given" : report.reason;
            }
            check_links(now);
          },
          [&](const wire::Blocked& blocked) {
            if (!is_member) return;
            if (blocked.waits.size() > options_.max_waits)
              return misuse("it waits in too many calls");
            peer->blocked = blocked;
            peer->blocked_at_ordinal = applied;
            check_stuck(now);
          },
          [&](const wire::WantRelay& want) {
            // Of two members the newer one asks, and both know which one that is.
            const Peer* other = member(want.peer);
            const bool older = other != nullptr && peer->member.joined <= other->member.joined;
            if (!is_member || older || want.stripes == 0 ||
                want.stripes > options_.max_relay_stripes)
              return misuse("a relay that is not due");
            on_want_relay(*peer, want, now);
          },
          [&](const wire::Leave& leave) {
            if (is_member) {
              const bool finished = leave.reason.empty();
              remove({{id, Code::evicted, finished ? "it left" : leave.reason, finished}}, now);
            } else {
              around_.close(from);
              const wire::Member gone = peer->member;
              std::erase_if(candidates_,
                            [&](const Peer& candidate) { return candidate.connection == from; });
              tell_newcomers();
              around_.rank_departed(id_, gone, "it left", false, false);
            }
          },
          [&](const auto&) { misuse("a message that peers do not send here"); }},
      frame.message);
}

// Both ends get a token each: whoever brings one is the peer that we have told it to.
void Group::on_want_relay(Peer& from, const wire::WantRelay& want, Instant now) {
  const PeerId id = from.member.id;
  const Peer* other = member(want.peer);
  const std::pair<PeerId, PeerId> pair = std::minmax(id, want.peer);
  if (other == nullptr || !relayed_pairs().contains(pair)) {
    (void)stray(from, "relays that no epoch speaks of", now);
    return;
  }
  // Asked again until it is back. The record may be of a master that relayed.
  if (other->connection == 0 || !options_.relays || !from.wants.take(options_.wants, now)) return;
  wanted_.insert(pair);
  for (std::uint32_t i = 0; i < want.stripes; ++i) {
    const auto tokens = around_.expect_relay(id, want.peer);
    if (!tokens) return;
    around_.send(from.connection, collected_, wire::Relay{want.peer, tokens->first});
    around_.send(other->connection, collected_, wire::Relay{id, tokens->second});
  }
}

void Group::on_operation(Peer& from, const wire::OpState& state, std::uint64_t applied,
                         Instant now) {
  if (state.key.admission != record_.admission) {
    (void)stray(from, "operations of other admissions", now);
    return;
  }
  if (decided_beyond(state.key, applied)) {
    (void)floods(from, 0, now);
    return;
  }
  if (operations_.size() >= options_.max_open_calls && !operations_.contains(state.key)) {
    const PeerId id = from.member.id;
    evict_busiest(now);
    if (member(id) == nullptr || operations_.size() >= options_.max_open_calls) return;
    return on_operation(*member(id), state, applied, now);
  }
  const auto [it, fresh] = operations_.try_emplace(state.key);
  OpenOperation& operation = it->second;
  if (fresh) {
    operation.opened = now;
    operation.rerun = state.rerun;
  }
  // A report of an attempt that was aborted meanwhile says only that the peer has entered.
  const bool done = state.phase == wire::OpPhase::done && state.attempt >= record_.abort_floor;
  const auto [known, first] = operation.entries.try_emplace(from.member.id);
  Entry& entry = known->second;
  // Only progress is free.
  const bool again =
      !first && (state.attempt > record_.epoch ||
                 std::pair(state.attempt, done) <= std::pair(entry.attempt, entry.done));
  if (again && floods(from, 0, now)) return;
  entry.signature = state.signature;
  if (operations_.size() > options_.many_open_calls &&
      entry.signature.text.size() > options_.short_text) {
    entry.signature.text.resize(options_.short_text);
    entry.signature.text.shrink_to_fit();
  }
  entry.attempt = state.attempt;
  entry.done = done;
  if (!operation.met && operation.entries.size() == members_.size()) operation.met = now;
  check_operation(state.key, now);
}

void Group::check_operation(const wire::OpKey& key, Instant now) {
  const auto it = operations_.find(key);
  if (it == operations_.end()) return;
  OpenOperation& operation = it->second;
  std::vector<Claim> claims;
  std::size_t done = 0;
  for (const Peer& peer : members_) {
    const auto entry = operation.entries.find(peer.member.id);
    if (entry == operation.entries.end()) continue;
    if (entry->second.done) ++done;
    // Plans differ between attempts, and with them signatures: only those of the present attempts
    // are compared.
    if (entry->second.attempt >= record_.abort_floor)
      claims.push_back({peer.member.id, entry->second.signature,
                        static_cast<std::size_t>(&peer - members_.data())});
  }
  if (claims.size() > 1) {
    const bool waited =
        operation.mismatch_since && now - *operation.mismatch_since >= options_.mismatch_grace;
    if (const auto mismatch =
            judge_mismatch(wire::describe(key), claims, members_.size(), waited)) {
      decide(key, Code::mismatched_call, mismatch->culprit, mismatch->reason, {});
      return;
    }
    const bool differ = std::any_of(claims.begin(), claims.end(), [&](const Claim& claim) {
      return claim.signature.hash != claims.front().signature.hash;
    });
    if (differ) {
      if (!operation.mismatch_since) operation.mismatch_since = now;
      return;
    }
  }
  if (done < members_.size()) return;
  const Duration taken = now - operation.met.value_or(now);
  if (options_.measure_after > Duration::zero() && taken >= options_.measure_after) slow_ = true;
  decide(key, Code::ok, {}, {}, {});
}

void Group::on_round(const PeerId& from, const wire::RoundEntry& entry, std::uint64_t applied,
                     Instant now) {
  Peer* sender = member(from);
  if (sender == nullptr || !payload_fits(entry)) return;
  const auto known = rounds_.find(entry.key);
  const bool decided =
      entry.key.admission != record_.admission || decided_beyond(entry.key, applied);
  const bool again = known != rounds_.end() && known->second.entered.contains(from);
  if ((decided || again) && floods(*sender, bytes_of(entry.payload) / kBytesOfItem, now)) return;
  if (decided) return;
  if (too_much(from, entry)) {
    return remove({{from, Code::evicted, "protocol misuse: it holds too many syncs open"}}, now);
  }
  if (rounds_.size() >= options_.max_open_calls && !rounds_.contains(entry.key)) {
    evict_busiest(now);
    if (member(from) == nullptr || rounds_.size() >= options_.max_open_calls) return;
    return on_round(from, entry, applied, now);
  }
  OpenRound& round = rounds_[entry.key];
  if (round.entered.empty()) round.opened = now;
  if (!round.entered.contains(from)) round.bytes += bytes_of(entry.payload);
  round.entered[from] = entry.payload;
  check_round(entry.key, now);
}

void Group::check_round(const wire::RoundKey& key, Instant now) {
  const auto it = rounds_.find(key);
  if (it == rounds_.end() || it->second.entered.size() < members_.size()) return;
  switch (key.kind) {
    case wire::RoundKind::admit:
    case wire::RoundKind::sync_admit:
      if (ranks_ > 0) {
        const auto replicas = around_.replicas_to_admit(id_, wire::next_point(record_, key.kind));
        if (!replicas) return;
        if (!replicas->empty()) return let_newcomers_in(key.kind, *replicas);
        around_.replicas_changed();
      } else if (newcomers_ready()) {
        return let_newcomers_in(key.kind, {});
      }
      break;
    case wire::RoundKind::sync:
    case wire::RoundKind::sync_detail:
    case wire::RoundKind::sync_end:
      return check_sync(key, now);
    case wire::RoundKind::optimize:
      return optimize(key);
    case wire::RoundKind::peers_pending:
    case wire::RoundKind::barrier:
      break;
  }
  decide(key, Code::ok, {}, {}, {});
}

// There are links between hosts, and of some of them nobody knows how fast they are. Once after
// each admission: measuring takes a second or two, and may fail to find out.
bool Group::measuring_helps() {
  if (!slow_ || asked_to_measure_ == record_.admission || members_.size() > topology::kMaxTable)
    return false;
  const std::vector<std::uint32_t>& hosts = present_hosts();
  if (std::adjacent_find(hosts.begin(), hosts.end(), std::not_equal_to<>()) == hosts.end())
    return false;
  return rates_.hosts.size() != members_.size() ||
         std::any_of(rates_.hosts.begin(), rates_.hosts.end(),
                     [](const wire::HostRate& host) { return host.up_kilobytes_per_s == 0; });
}

// Whether that is done at this admission point. Not if somebody's program measures when it likes
// (level 1).
bool Group::measure_at(const wire::RoundKey& key) {
  const auto round = rounds_.find(key);
  if (round == rounds_.end() || !measuring_helps()) return false;
  const bool all =
      std::all_of(round->second.entered.begin(), round->second.entered.end(), [](const auto& item) {
        const auto* point = std::get_if<wire::AdmissionPoint>(&item.second);
        return point != nullptr && point->measures;
      });
  // Once, also where somebody says no.
  asked_to_measure_ = record_.admission;
  slow_ = false;
  if (!all) return false;
  around_.log("group " + std::to_string(id_) + ": operations are slow, so the links are measured");
  return true;
}

// All members have said what they measured. The epoch has it for all, even where the plan stays: so
// it is known to whoever has to plan next.
void Group::optimize(const wire::RoundKey& key) {
  const OpenRound& round = rounds_.at(key);
  const std::vector<PeerId> ids = member_ids();
  for (std::size_t rank = 0; rank < ids.size(); ++rank) {
    if (const auto* row = std::get_if<wire::Measurements>(&round.entered.at(ids[rank])))
      topology::merge(rates_, ids, rank, *row);
  }
  if (rates_ != record_.rates && plan_epoch()) start_over(wire::Cause::plan, {}, {});
  decide(key, Code::ok, {}, {}, {});
}

// All members have said what they have; what that means is for state/election.h to say.
void Group::check_sync(const wire::RoundKey& key, Instant now) {
  const OpenRound& round = rounds_.at(key);
  state::Judgement judgement;
  if (key.kind == wire::RoundKind::sync_end) {
    std::vector<std::pair<PeerId, wire::SyncEnd>> ends;
    for (const auto& [id, payload] : round.entered)
      ends.emplace_back(id, std::get<wire::SyncEnd>(payload));
    judgement = state::judge_ends(ends);
  } else {
    std::vector<state::Ballot> ballots;
    for (const Peer& peer : members_) {
      const wire::RoundPayload& payload = round.entered.at(peer.member.id);
      if (const auto* detail = std::get_if<wire::SyncDetail>(&payload)) {
        ballots.push_back({peer.member.id, detail->vote, &detail->entries});
      } else {
        ballots.push_back({peer.member.id, std::get<wire::SyncVote>(payload), nullptr});
      }
    }
    judgement = key.kind == wire::RoundKind::sync ? state::judge_votes(ballots, record_.state)
                                                  : state::judge_details(ballots, record_.state);
  }
  if (!judgement.removals.empty()) {
    // The round goes on without them.
    std::vector<Departed> gone;
    for (state::Removal& removal : judgement.removals)
      gone.push_back({removal.peer, removal.code, std::move(removal.reason)});
    return remove(gone, now);
  }
  if (judgement.code != Code::ok) judgement.decision = {};
  decide(key, judgement.code, judgement.culprit, judgement.reason, {}, judgement.decision);
}

// `replicas`: their ranks come in, in that order; else whoever is ready.
void Group::let_newcomers_in(wire::RoundKind kind, const std::vector<std::string>& replicas) {
  // Everybody stands at the same call: the newcomers that are ready come in here, and all counters
  // start anew.
  const std::size_t before = members_.size();
  rounds_.clear();
  operations_.clear();
  const auto let_in = [&](const std::string& replica) {
    for (std::size_t at = 0; at < candidates_.size();) {
      // (Of several, each may fit without the others.)
      if (newcomer_ready(candidates_[at]) && candidates_[at].member.replica == replica &&
          (!replica.empty() || fits(candidates_[at]))) {
        members_.push_back(take_candidate(at));
        const PeerId id = members_.back().member.id;
        for (const PeerId& other : std::exchange(members_.back().unreachable, {}))
          unusable_.insert(std::minmax(id, other));
        if (!replica.empty()) return;  // of a second of that name nothing is known
      } else {
        ++at;
      }
    }
  };
  if (ranks_ == 0) let_in({});
  for (const std::string& replica : replicas) let_in(replica);
  if (!plan_epoch()) {
    unusable_.clear();
    unrelayable_.clear();
    plan_epoch();
  }
  around_.log("group " + std::to_string(id_) + ": " + plural(members_.size() - before, "newcomer") +
              " let in, " + plural(members_.size(), "member"));
  const bool syncing = kind == wire::RoundKind::sync_admit;
  record_.syncing = syncing;
  if (ranks_ > 0) {
    record_.points = wire::next_point(record_, kind);
    record_.point_open = syncing;
    around_.replicas_changed();
  }
  begin_epoch(wire::Cause::admission, {}, {});
}

void Group::check_calls(Instant now) {
  std::vector<wire::OpKey> operations;
  for (const auto& [key, operation] : operations_) operations.push_back(key);
  for (const wire::OpKey& key : operations) check_operation(key, now);
  std::vector<wire::RoundKey> rounds;
  for (const auto& [key, round] : rounds_) rounds.push_back(key);
  for (const wire::RoundKey& key : rounds) check_round(key, now);
}

// ---- links, silence, stuck groups
// ---------------------------------------------------------------------------------

// Perhaps gone: whether it is, is known by the heartbeat timeout.
bool Group::silent(const Peer& peer, Instant now) const {
  return peer.connection == 0 || now - peer.heard >= 2 * options_.heartbeat_interval;
}

void Group::on_mended(const std::pair<PeerId, PeerId>& pair, bool through_us, Instant now) {
  // One that was to be relayed has come about without us. (They say which, as it may have come
  // about before this epoch, or under another master.)
  const std::pair<PeerId, PeerId> ordered = std::minmax(pair.first, pair.second);
  if (!through_us && relayed_pairs().contains(ordered) &&
      topology::edges(record_.plan).contains(*ranks_of({ordered}).begin()))
    unusable_.erase(ordered);
  const auto it = trouble_.find(pair);
  if (it == trouble_.end() || it->second.late) return;
  if (!it->second.broke) {
    trouble_.erase(it);
  } else if (it->second.state != wire::LinkState::broken) {
    it->second.state = wire::LinkState::broken;
    it->second.since = now;
  }
}

bool Group::plan_around(const std::vector<BadLink>& bad) {
  std::set<std::pair<PeerId, PeerId>> pairs;
  for (const BadLink& link : bad) pairs.insert(std::minmax(link.reporter, link.about));
  if (pairs == unavoidable_) return false;  // that was tried
  // A link that was to be relayed has failed that way as well.
  const std::set<std::pair<PeerId, PeerId>> relayed = relayed_pairs();
  std::set<std::pair<PeerId, PeerId>> added;
  std::set<std::pair<PeerId, PeerId>> failed;
  for (const auto& pair : pairs) {
    if (unusable_.insert(pair).second) added.insert(pair);
    if (relayed.contains(pair) && unrelayable_.insert(pair).second) failed.insert(pair);
  }
  if (plan_epoch()) {
    around_.log("group " + std::to_string(id_) + ": planned around " +
                plural(bad.size(), "bad link report"));
    return true;
  }
  for (const auto& pair : added) unusable_.erase(pair);
  for (const auto& pair : failed) unrelayable_.erase(pair);
  unavoidable_ = std::move(pairs);
  return false;
}

// No plan does without all of these. As many go as have to, at once: the next one to go would be
// found only after as long again.
void Group::evict_for_links(const std::vector<BadLink>& bad, std::vector<BadLink> overdue,
                            Instant now) {
  trouble_.clear();
  const std::set<std::pair<PeerId, PeerId>> relayed = relayed_pairs();
  for (const BadLink& link : overdue) {
    const std::pair<PeerId, PeerId> pair = std::minmax(link.reporter, link.about);
    if (relayed.contains(pair)) unrelayable_.insert(pair);
  }
  std::vector<Departed> gone;
  std::vector<PeerId> left = member_ids();
  for (std::optional<PeerId> victim = judge_links(left, bad); victim;
       victim = judge_links(left, overdue)) {
    std::set<PeerId> others;
    for (const BadLink& link : bad) {
      if (link.about == *victim) others.insert(link.reporter);
      if (link.reporter == *victim) others.insert(link.about);
    }
    std::string with;
    for (const PeerId& other : others) with += " " + other.brief();
    gone.push_back({*victim, Code::unreachable,
                    "its links to these peers do not work:" + with +
                        "; no plan does without them: " + advice(options_)});
    std::erase(left, *victim);
    std::erase_if(overdue, [&](const BadLink& link) {
      return link.about == *victim || link.reporter == *victim;
    });
    std::set<topology::Edge> edges;
    std::set<topology::Edge> never;
    const auto add = [&](const PeerId& a, const PeerId& b, std::set<topology::Edge>& to) {
      const auto first = std::find(left.begin(), left.end(), a) - left.begin();
      const auto second = std::find(left.begin(), left.end(), b) - left.begin();
      const auto n = static_cast<std::ptrdiff_t>(left.size());
      if (first < n && second < n)
        to.insert(
            std::minmax(static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(second)));
    };
    for (const BadLink& link : overdue) add(link.reporter, link.about, edges);
    for (const auto& [a, b] : unusable_) add(a, b, edges);
    for (const auto& [a, b] : unrelayable_) add(a, b, never);
    if (has_plan(left.size(), edges, never)) break;
  }
  for (const BadLink& link : overdue) unusable_.insert(std::minmax(link.reporter, link.about));
  if (!gone.empty()) remove(gone, now);
}

// Of the links that have just broken, those that did so too often. (Who of the two broke it cannot
// be known. The plan can do without it.)
std::vector<BadLink> Group::worn_links(Instant now) {
  std::set<std::pair<PeerId, PeerId>> pairs;
  std::vector<BadLink> worn;
  for (const auto& [pair, trouble] : trouble_) {
    if (trouble.late || trouble.state != wire::LinkState::broken) continue;
    const auto ordered = std::minmax(pair.first, pair.second);
    if (!pairs.insert(ordered).second) continue;
    if (!breaks_[ordered].take(options_.breaks, now)) worn.push_back({pair.first, pair.second});
  }
  return worn;
}

void Group::check_links(Instant now) {
  std::erase_if(trouble_, [&](const auto& item) {
    return item.second.late && now - item.second.since >= options_.broken_link_grace;
  });
  const std::set<std::pair<PeerId, PeerId>> relayed = relayed_pairs();
  std::vector<Departed> gone;
  for (const Peer& peer : members_) {
    if (peer.connection != 0) continue;
    // A broken control connection and one report of a bad link: that is what a killed process looks
    // like.
    for (const auto& [pair, trouble] : trouble_) {
      // (What a master relayed ends with it, and says nothing of who has yet to come back.)
      const bool ours = !peer.returned && relayed.contains(std::minmax(pair.first, pair.second));
      if (pair.second == peer.member.id && !ours) {
        gone.push_back({peer.member.id, Code::evicted, "connection lost (" + trouble.reason + ")"});
        break;
      }
    }
  }
  if (!gone.empty()) return remove(gone, now);

  bool reset = false;
  std::vector<BadLink> bad;
  std::vector<BadLink> overdue;
  bool ripe = false;
  for (const auto& [pair, trouble] : trouble_) {
    if (trouble.late) continue;
    const Duration age = now - trouble.since;
    if (trouble.state == wire::LinkState::broken) {
      reset = reset || age >= options_.broken_link_grace;
      continue;
    }
    // If one of the two is silent to us as well, it is that one, and not the link.
    const Peer* from = member(pair.first);
    const Peer* about = member(pair.second);
    if (from == nullptr || about == nullptr || silent(*from, now) || silent(*about, now)) continue;
    bad.push_back({pair.first, pair.second});
    ripe = ripe || age >= options_.heartbeat_interval;
    if (age >= options_.heartbeat_timeout) overdue.push_back(bad.back());
  }
  if (ripe) {
    const bool planned = plan_around(bad);
    reset = reset || planned;
    // Somebody has to go. But who is put out for a link gets as much time as who is put out for its
    // silence: had one of the two died just then, we would know it by now.
    if (!planned && !overdue.empty()) return evict_for_links(bad, overdue, now);
  }
  if (!reset) return;
  if (const std::vector<BadLink> worn = worn_links(now); !worn.empty() && !plan_around(worn)) {
    // One that breaks its links to several is in most of them; of a single pair nobody has to go.
    const std::optional<PeerId> victim = judge_links(member_ids(), worn);
    const auto with_it = std::count_if(worn.begin(), worn.end(), [&](const BadLink& link) {
      return victim && (link.about == *victim || link.reporter == *victim);
    });
    if (with_it > 1) {
      trouble_.clear();
      return remove({{*victim, Code::unreachable, "its links break again and again"}}, now);
    }
  }
  // Both ends live: what was in flight on the link is lost, so operations start over while it is
  // dialled again.
  std::vector<wire::OpKey> aborted;
  std::string reason = "a connection between two members broke";
  const auto worst = std::find_if(trouble_.begin(), trouble_.end(),
                                  [](const auto& item) { return !item.second.late; });
  if (worst != trouble_.end()) {
    const auto& [pair, trouble] = *worst;
    reason += " (" + pair.first.brief() + " - " + pair.second.brief() + ": " + trouble.reason + ")";
  }
  around_.log("group " + std::to_string(id_) + ": " + reason);
  trouble_.clear();
  for (const auto& [key, operation] : operations_) {
    if (!operation.rerun) aborted.push_back(key);
  }
  start_over(wire::Cause::loss, {{PeerId{}, reason}}, aborted);
}

// "rank 2 (1a2b3c4d)", or "peer 1a2b3c4d" of one that is no member.
std::string Group::named(const PeerId& id) const {
  const std::size_t rank = rank_of(id);
  if (rank >= members_.size()) return "peer " + id.brief();
  return "rank " + std::to_string(rank) + " (" + id.brief() + ")";
}

// "collective #3 (all_gather of float32[8])", as far as its members have said what it is.
std::string Group::called(const wire::CallKey& key) const {
  std::string text = wire::describe(key);
  const auto* operation = std::get_if<wire::OpKey>(&key);
  const auto found = operation == nullptr ? operations_.end() : operations_.find(*operation);
  if (found == operations_.end() || found->second.entries.empty()) return text;
  std::string what = found->second.entries.begin()->second.signature.text;
  if (what.size() > kShownOfSignature) what = what.substr(0, kShownOfSignature) + "...";
  return text + " (" + what + ")";
}

void Group::check_stuck(Instant now) {
  std::vector<Waiting> waiting;
  for (const Peer& peer : members_) {
    waiting.push_back({peer.member.id,
                       peer.connection != 0 && peer.blocked_at_ordinal == last_ordinal_,
                       peer.blocked});
  }
  const Stuckness verdict =
      judge_stuck(waiting, [&](const wire::CallKey& call) { return entered_by_all(call); });
  if (verdict == Stuckness::moving) {
    stuck_since_.reset();
    return;
  }
  if (!stuck_since_) stuck_since_ = now;
  if (verdict == Stuckness::suspicious && now - *stuck_since_ < options_.several_threads_grace)
    return;
  const auto name = [this](const wire::CallKey& key) { return called(key); };
  const std::string text = describe_waiting(waiting, "; ", name);
  const std::string lines = describe_waiting(waiting, "\n", name);
  std::set<wire::CallKey> calls;
  for (const Waiting& member : waiting)
    calls.insert(member.blocked.waits.begin(), member.blocked.waits.end());
  around_.log("group " + std::to_string(id_) + " is stuck: " + text);
  stuck_since_.reset();
  for (const wire::CallKey& call : calls) {
    // (Of another admission, or of a call that is over, it would be a decision for ever.)
    if (std::visit([](const auto& key) { return key.admission; }, call) != record_.admission)
      continue;
    decide(call, Code::deadlock, {}, "the members wait in calls that cannot meet: " + text, lines);
  }
}

// Tells members whom they wait for: one line for all calls that the same peers are missing in.
void Group::notice_stragglers(Instant now) {
  struct Wait {
    wire::CallKey oldest;
    Instant opened{};
    bool due = false;
    std::vector<std::optional<Instant>*> noticed;  // of all its calls
  };
  const auto is_due = [&](Instant opened, const std::optional<Instant>& noticed) {
    return noticed ? now - *noticed >= options_.straggler_repeat
                   : now - opened >= options_.straggler_notice;
  };
  const auto any_due = [&](const auto& calls) {
    return std::any_of(calls.begin(), calls.end(), [&](const auto& item) {
      return is_due(item.second.opened, item.second.noticed);
    });
  };
  if (!any_due(operations_) && !any_due(rounds_)) return;
  std::map<std::vector<PeerId>, Wait> waits;  // by who is missing
  const auto count = [&](const wire::CallKey& key, auto& call, const auto& entered) {
    std::vector<PeerId> missing;
    for (const Peer& peer : members_)
      if (!entered.contains(peer.member.id)) missing.push_back(peer.member.id);
    if (missing.empty()) return;
    Wait& wait = waits[missing];
    if (wait.noticed.empty() || call.opened < wait.opened) {
      wait.oldest = key;
      wait.opened = call.opened;
    }
    wait.due = wait.due || is_due(call.opened, call.noticed);
    wait.noticed.push_back(&call.noticed);
  };
  for (auto& [key, operation] : operations_) count(key, operation, operation.entries);
  for (auto& [key, round] : rounds_) count(key, round, round.entered);
  for (const auto& [missing, wait] : waits) {
    if (!wait.due) continue;
    for (std::optional<Instant>* noticed : wait.noticed) *noticed = now;
    std::string names;
    for (std::size_t i = 0; i < std::min<std::size_t>(missing.size(), 4); ++i)
      names += (i > 0 ? ", " : " ") + named(missing[i]);
    const auto waited = std::chrono::duration_cast<std::chrono::seconds>(now - wait.opened);
    std::string line = "waiting for " + plural(missing.size(), "peer") + " in " +
                       called(wait.oldest) + " for " + std::to_string(waited.count()) +
                       " s:" + names + (missing.size() > 4 ? " ..." : "");
    if (wait.noticed.size() > 1) line += "; and in " + plural(wait.noticed.size() - 1, "more call");
    for (const Peer& peer : members_) {
      const bool waits_too =
          std::find(missing.begin(), missing.end(), peer.member.id) == missing.end();
      if (peer.connection != 0 && waits_too)
        around_.send(peer.connection, collected_, wire::Notice{line});
    }
  }
}

// Nobody waits for ever. Members that half of the group or more has waited for too long are
// evicted. If more than half are missing, it is the call that ends.
void Group::end_overdue(Instant now) {
  if (!options_.straggler_timeout) return;
  std::vector<Departed> gone;
  std::vector<std::pair<wire::CallKey, std::string>> over;
  const auto judge = [&](const wire::CallKey& key, Instant opened, auto has_entered) {
    if (now - opened < *options_.straggler_timeout || !gone.empty()) return;
    std::string names;
    for (const Peer& peer : members_) {
      if (has_entered(peer.member.id)) continue;
      names += (names.empty() ? " " : ", ") + named(peer.member.id);
      gone.push_back({peer.member.id, Code::evicted,
                      "the others have waited too long for it in " + called(key)});
    }
    if (gone.size() * 2 <= members_.size()) return;
    gone.clear();
    over.emplace_back(key, "more than half of the members have not called " + called(key) +
                               " within the straggler timeout:" + names);
  };
  for (const auto& [key, operation] : operations_) {
    judge(key, operation.opened, [&](const PeerId& id) { return operation.entries.contains(id); });
  }
  for (const auto& [key, round] : rounds_) {
    // Who has not entered those receives state, or measures; links are watched for it.
    if (key.kind == wire::RoundKind::sync_end || key.kind == wire::RoundKind::optimize) continue;
    judge(key, round.opened, [&](const PeerId& id) { return round.entered.contains(id); });
  }
  for (const auto& [key, reason] : over) decide(key, Code::timeout, {}, reason, {});
  if (!gone.empty()) remove(gone, now);
}

void Group::on_time(Instant now) {
  const auto seconds = [](Duration duration) {
    return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(duration).count()) +
           " s";
  };
  if (last_tick_ != Instant{} && now - last_tick_ > options_.heartbeat_timeout / 2) {
    // We were frozen, perhaps with everybody: what was said meanwhile is still to be read.
    for (Peer& peer : members_) peer.heard = peer.disconnected_at = now;
    for (Peer& candidate : candidates_) candidate.heard = now;
  }
  last_tick_ = now;
  std::vector<Departed> gone;
  for (const Peer& peer : members_) {
    if (peer.connection != 0 && now - peer.heard >= options_.heartbeat_timeout) {
      gone.push_back(
          {peer.member.id, Code::evicted, "not heard for " + seconds(options_.heartbeat_timeout)});
    } else if (peer.connection == 0 && now - peer.disconnected_at >= options_.reconnect_timeout) {
      gone.push_back({peer.member.id, Code::evicted,
                      "its control connection broke and did not come back within " +
                          seconds(options_.reconnect_timeout)});
    }
  }
  if (!gone.empty()) remove(gone, now);
  replan_hosts(now);
  reconsider_plan(now);
  std::vector<ConnectionId> silent;
  for (const Peer& candidate : candidates_) {
    if (now - candidate.heard >= options_.heartbeat_timeout) silent.push_back(candidate.connection);
  }
  for (const ConnectionId connection : silent) {
    evict(connection, Code::evicted, "not heard for " + seconds(options_.heartbeat_timeout), now);
  }
  evict_laggards(now);
  check_links(now);
  check_calls(now);
  check_stuck(now);
  notice_stragglers(now);
  end_overdue(now);
}

}  // namespace pccl::master
