#include "pccl/master/takeover.h"

#include <algorithm>
#include <utility>

#include "pccl/digest/ticket.h"
#include "pccl/master/reports.h"

namespace pccl::master {
namespace {

// How long a master waits for more members, or for their promises, once a majority is there.
constexpr Duration kTakeoverGrace = std::chrono::milliseconds(400);
// How often a master steps down since the same member has followed a higher term. One that looks
// for a master at the same time as others may need a few in a row.
// [test_a_member_that_repeats_a_false_term...]
constexpr Rate kStepDowns{4, 0.1};

}  // namespace

// -- standing back

void Takeover::check_quorums(Instant now) {
  const bool frozen =
      last_check_ != Instant{} && now - last_check_ > options_.heartbeat_timeout / 2;
  last_check_ = now;
  if (!run_.quiet_since) run_.quiet_since = now;
  std::map<std::uint32_t, std::set<Seat>> here;
  for (const auto& [id, connection] : connections_.all()) {
    if (connection.closing || !connection.group) continue;
    const Quorum* const quorum = served_.quorum(*connection.group);
    if (quorum != nullptr && quorum->accepts(connection.seat))
      here[*connection.group].insert(connection.seat);
  }
  bool alone = true;  // no group that is no pair has its majority here
  std::vector<std::uint32_t> hopeless;
  for (const auto& [group, known] : served_.all()) {
    Quorum& quorum = *served_.quorum(group);
    if (frozen) quorum.excuse(now);
    if (known->record().epoch == 0) continue;
    if (quorum.hopeless(here[group], options_.heartbeat_timeout, now)) {
      hopeless.push_back(group);
    } else if (group < kFirstPair && !known->empty() && quorum.has_majority()) {
      alone = false;
    }
  }
  const bool only_pairs = std::ranges::all_of(hopeless, [](auto id) { return id >= kFirstPair; });
  if (alone && !only_pairs) return step_down("a majority of the members cannot be reached");
  for (const std::uint32_t group : hopeless) served_.abandon(group);
}

// Forgets all groups. Their members go to the next master.
void Takeover::step_down(const std::string& why) {
  outbox_.log("this master steps down: " + why);
  connections_.part_from({}, [](ConnectionId) {});
  served_.clear();
  run_.quiet_since = outbox_.now();
  run_.admission_paused = false;  // the master that takes over does not know of it
  // The run may go on elsewhere: this master must not begin another one with the same id.
  if (run_.id == run_.own) run_.own = next_run(run_.own);
  returning_.forget_run();
}

// Ends a run that has not begun, for one that has. False: this master is busy with another one.
bool Takeover::give_way() {
  if (served_.begun(true) || !returning_.recoveries.empty()) return false;
  connections_.part_from({}, [&](ConnectionId id) {
    outbox_.log_rarely("members of another run return to this master; newcomers must wait");
    connections_.send(id, run_.term, 0, wire::NotServing{true});
  });
  served_.clear();
  run_.admission_paused = false;  // it was of the run that has not begun
  return true;
}

// -- newcomers

void Takeover::on_join(ConnectionId id, ControlPeer& connection, const wire::Frame& frame,
                       Instant now) {
  const auto& first = std::get<wire::Join>(frame.message);
  if (first.ranks_per_replica > 0)
    return connections_.refuse(id, Code::refused, "replicas need a run with one master address");
  connection.term = frame.envelope.term;
  connection.seat = {first.id, digest::seal_of(first.ticket)};
  const bool same_run = frame.envelope.run == 0 || frame.envelope.run == run_.id;
  const auto not_serving = [&](bool recovers) {
    connections_.send(id, run_.term, 0, wire::NotServing{recovers});
    connections_.close(id);
  };
  const auto open = returning_.recoveries.find(first.group);
  if (open != returning_.recoveries.end()) {
    if (!same_run || !wanted(open->second, connection.seat)) return not_serving(true);
    connection.join = first;
    connection.recovers = true;
    open->second.changed = true;
    if (open->second.term != 0) ask_promise(id, connection, open->second);
    return take_over_if_ready(first.group, now);
  }
  const Group* const known = served_.find(first.group);
  const bool serves =
      known != nullptr && !known->empty() && (known->record().epoch > 0 || connection.may_found);
  // Only the first master begins runs, and only for peers that found no other one.
  // Members of a run that this master served before may not have reached another one.
  const bool quiet = run_.quiet_since && now - *run_.quiet_since >= quiet_time(options_);
  const bool founds =
      options_.place.index == 0 && connection.may_found && run_.id == run_.own && quiet;
  // Own groups begin where the run is. Their numbers are random, and those that enter one have
  // told each other the number, so nobody waits for a group of that number at another master.
  const bool own = first.group >= kOwnGroups && served_.begun(false) && quiet;
  if (!same_run || !(serves || founds || own)) return not_serving(serves || !quiet);
  if (!let_vote(id, connection, first)) served_.join(id, connection, first, now);
  const Quorum* const quorum = served_.quorum(first.group);
  if (quorum != nullptr) served_.propose_to(id, *quorum);
  served_.settle(now);
}

// A peer that was admitted and does not know it has a vote on the epoch that removes it again. It
// gets the log up to there. False: it is no such peer.
bool Takeover::let_vote(ConnectionId id, ControlPeer& connection, const wire::Join& first) {
  const Quorum* const quorum = served_.quorum(first.group);
  const Group* const group = served_.find(first.group);
  if (quorum == nullptr || group == nullptr) return false;
  const auto is_this = [&](const wire::Member& member) {
    return member.id == connection.seat.first && member.seal == connection.seat.second;
  };
  if (quorum->proposal() == nullptr || !quorum->accepts(connection.seat) ||
      std::ranges::any_of(group->record().members, is_this))
    return false;
  std::vector<wire::LogEntry> entries;
  std::uint64_t joined = 0;
  for (const wire::LogEntry& entry : group->log().entries()) {
    if (entry.ordinal >= quorum->proposal()->ordinal) break;
    const auto* record = std::get_if<wire::EpochRecord>(&entry.what);
    if (entries.empty()) {
      if (record == nullptr) continue;
      const auto found = std::ranges::find_if(record->members, is_this);
      if (found == record->members.end()) continue;
      joined = found->joined;
    }
    entries.push_back(entry);
  }
  if (entries.empty()) return false;
  connection.group = first.group;
  connections_.send(id, quorum->term(), 0, wire::Welcome{joined, true, 0, {}});
  for (auto& part : wire::in_parts(std::move(entries)))
    connections_.send(id, quorum->term(), 0, wire::Log{std::move(part)});
  // These wait until it is decided.
  served_.send(id, 0, wire::Refused{Code::evicted, "the run went on without this peer"});
  served_.close(id);
  return true;
}

// -- returning members

void Takeover::on_rejoin(ConnectionId id, ControlPeer& connection, const wire::Frame& frame,
                         Instant now) {
  const auto& rejoin = std::get<wire::Rejoin>(frame.message);
  if (const Status sound = check(rejoin, options_); !sound)
    return connections_.refuse(id, sound.error().code, sound.error().reason);
  const bool same_run = frame.envelope.run == run_.id;
  const std::uint32_t ahead = kMaxTermsAhead * options_.place.masters;
  connection.term = frame.envelope.term;
  connection.seat = {rejoin.id, digest::seal_of(rejoin.ticket)};
  const Group* const group = served_.find(rejoin.group);
  const bool known = group != nullptr;
  if (known && group->record().epoch > 0) {
    const Quorum& quorum = *served_.quorum(rejoin.group);
    if (!same_run) return connections_.close(id);
    if (foreign(rejoin.group, connection.seat)) return appeal(id, connection, rejoin, now);
    if (frame.envelope.term <= quorum.term()) {
      returning_.return_to(id, connection, rejoin, nullptr, now);
      return served_.settle(now);
    }
    // Another master asked for its promise.
    if (!quorum.accepts(connection.seat) || frame.envelope.term > quorum.term() + ahead)
      return connections_.close(id);
    // False reports of one member must not keep the run busy with takeovers.
    if (step_downs_.size() > options_.limits.max_peers) step_downs_.clear();
    if (!step_downs_[connection.seat].take(kStepDowns, now)) return connections_.close(id);
    step_down("a member has followed a master of term " + std::to_string(frame.envelope.term));
  }
  if (frame.envelope.term > kMaxTerm) return connections_.close(id);
  if ((!same_run || known) && !give_way()) return connections_.close(id);
  const auto open = returning_.recoveries.find(rejoin.group);
  // Terms are finite: a false one must not use them up.
  if (open != returning_.recoveries.end() && open->second.term != 0 &&
      connection.term > open->second.term + ahead)
    return connections_.close(id);
  Returned returned(id, rejoin);
  if (!returning_.admit(returned)) return;
  run_.id = frame.envelope.run;
  served_.erase(rejoin.group);  // it has no members here
  Recovery& recovery = returning_.recoveries[rejoin.group];
  if (recovery.reports.empty()) recovery.since = now;
  returning_.add(recovery, returned);
  recovery.changed = true;
  connection.recovers = true;
  for (const wire::Member& member : rejoin.record.members)
    run_.joins = std::max(run_.joins, member.joined);
  if (recovery.term != 0) {
    if (connection.term >= recovery.term) {
      ask_promises(rejoin.group, recovery, now);
    } else {
      ask_promise(id, connection, recovery);
    }
  }
  take_over_if_ready(rejoin.group, now);
}

// -- promises

// The peers on this side: members that have returned, and newcomers whose promise is needed.
std::map<Seat, ConnectionId> Takeover::gathered(std::uint32_t group,
                                                const Recovery& recovery) const {
  std::map<Seat, ConnectionId> seats;
  for (const auto& [id, connection] : connections_.all()) {
    if (!connection.closing && connection.recovers && connection.join &&
        connection.join->group == group)
      seats[connection.seat] = id;
  }
  for (const Returned& one : recovery.reports) seats[one.seat()] = one.connection();
  return seats;
}

std::vector<Reporter> Takeover::reporters(const Recovery& recovery) const {
  std::vector<Reporter> all;
  for (const Returned& one : recovery.reports) {
    const auto& promise = connections_.at(one.connection()).promise;
    all.push_back({&one, promise ? &*promise : nullptr});
  }
  return all;
}

std::set<Seat> Takeover::promised_newcomers() const {
  std::set<Seat> seats;
  for (const auto& [id, connection] : connections_.all()) {
    if (connection.join && connection.recovers && connection.promise) seats.insert(connection.seat);
  }
  return seats;
}

// Whether this newcomer may be a member of the last epoch without knowing it.
bool Takeover::wanted(const Recovery& recovery, const Seat& seat) const {
  return std::ranges::any_of(claims(reporters(recovery)), [&](const EpochClaim& claim) {
    return std::ranges::find(*claim.members, seat) != claim.members->end();
  });
}

void Takeover::ask_promise(ConnectionId id, ControlPeer& connection, const Recovery& recovery) {
  connection.promise.reset();
  connection.term = recovery.term;
  connections_.send(id, recovery.term, 0, wire::AskPromise{});
}

// Asks for promises to a term above all that these peers have followed.
void Takeover::ask_promises(std::uint32_t group, Recovery& recovery, Instant now) {
  const std::map<Seat, ConnectionId> seats = gathered(group, recovery);
  std::vector<std::uint32_t> terms;
  for (const auto& [seat, id] : seats) terms.push_back(connections_.at(id).term);
  std::ranges::sort(terms);
  // Terms are finite: a false one must not use them up.
  const std::uint32_t ahead = kMaxTermsAhead * options_.place.masters;
  const std::uint32_t most = terms[(terms.size() - 1) / 2] + ahead;
  std::uint32_t highest = std::max(recovery.term, terms.front());
  for (const std::uint32_t term : terms)
    if (term <= most) highest = std::max(highest, term);
  // A false term must not make this master serve with one that members know from it.
  recovery.term = served_.new_term(highest);
  recovery.promises_since = now;
  recovery.changed = true;
  recovery.waited = false;
  for (const auto& [seat, id] : seats) ask_promise(id, connections_.at(id), recovery);
}

void Takeover::on_promise(ConnectionId id, ControlPeer& connection, const wire::Frame& frame,
                          Instant now) {
  const auto& promise = std::get<wire::Promise>(frame.message);
  for (auto& [group, recovery] : returning_.recoveries) {
    const auto report = std::ranges::find(recovery.reports, id, &Returned::connection);
    const bool joins = connection.join && connection.join->group == group;
    if (report == recovery.reports.end() && !joins) continue;
    if (recovery.term == 0 || frame.envelope.term != recovery.term) return;  // of an earlier one
    Promised made;
    if (!promise.accepted.empty()) {
      const wire::Accepted& accepted = promise.accepted.front();
      const auto* record = std::get_if<wire::EpochRecord>(&accepted.entry.what);
      const bool follows = report != recovery.reports.end() && record != nullptr &&
                           record->epoch == report->at().first + 1 &&
                           accepted.entry.ordinal == report->at().second + 1;
      // An epoch without members: the group may have ended, each of them evicted.
      const bool sound = follows && (record->members.empty() || plausible(*record, options_)) &&
                         wire::check_relays(*record);
      if (promise.accepted.size() > 1 || !sound || accepted.term >= recovery.term) {
        connections_.refuse(id, Code::evicted, "its promise is inconsistent");
        return returning_.forget(id);
      }
      made.accepted = std::make_shared<const AcceptedEpoch>(accepted);
      for (const Reporter& other : reporters(recovery)) {
        if (other.promise == nullptr || !other.promise->accepted ||
            *other.promise->accepted != *made.accepted)
          continue;
        made.accepted = other.promise->accepted;
        break;
      }
    }
    connection.promise = std::move(made);
    if (returning_.too_many_bytes(0)) {
      returning_.close_for_lack_of_room(id);
      return returning_.forget(id);
    }
    recovery.changed = true;
    return take_over_if_ready(group, now);
  }
}

// -- the takeover

void Takeover::take_over_if_ready(std::uint32_t group, Instant now) {
  const auto it = returning_.recoveries.find(group);
  if (it == returning_.recoveries.end()) return;
  Recovery& recovery = it->second;
  if (now - recovery.since >= options_.reconnect_timeout) return end_recovery(group);
  // With many reports the rest takes time. Its result changes with these two only.
  const Instant since = recovery.term == 0 ? recovery.since : recovery.promises_since;
  const bool waited = now - since >= kTakeoverGrace;
  const bool first_time = std::exchange(recovery.waited, waited) != waited;
  const bool again = recovery.again && now >= *recovery.again;
  if (again) recovery.again.reset();
  if (std::exchange(recovery.changed, false) || first_time || again) consider(group, recovery, now);
}

void Takeover::end_recovery(std::uint32_t group) {
  outbox_.log("group " + std::to_string(group) + ": too few members came to this master");
  const auto node = returning_.recoveries.extract(group);
  run_.quiet_since = outbox_.now();
  for (const auto& [newcomer, id] : gathered(group, {})) connections_.close(id);
  for (const Returned& one : node.mapped().reports) connections_.close(one.connection());
  returning_.forget_run();
}

void Takeover::consider(std::uint32_t group, Recovery& recovery, Instant now) {
  const std::map<Seat, ConnectionId> seats = gathered(group, recovery);
  if (recovery.term == 0) {
    std::set<Seat> here;
    for (const auto& [seat, id] : seats) here.insert(seat);
    // No term is used up before a majority is here.
    for (const EpochClaim& claim : claims(reporters(recovery))) {
      const std::size_t back = count_members(claim, here);
      const bool complete = back == claim.members->size();
      if (back < majority_of(claim.members->size()) || (!complete && !recovery.waited)) continue;
      return ask_promises(group, recovery, now);
    }
    return;
  }
  const bool all = std::ranges::all_of(
      seats, [&](const auto& item) { return connections_.at(item.second).promise.has_value(); });
  if (!all && !recovery.waited) return;
  const std::optional<Base> base = choose_base(reporters(recovery), promised_newcomers());
  if (!base) return;
  if (const Instant enough = enough_since(*base, seats); now < enough) {
    recovery.again = enough;
    return;
  }
  if (base->proposed) {
    const auto& record = std::get<wire::EpochRecord>(base->proposed->what);
    if (record.members.empty()) return end_with(group, record);
  }
  auto log = returning_.whole_log(base->source, base->last, recovery, now);
  if (log) return take_over(group, *base, std::move(*log), now);
  if (recovery.prefix_due) recovery.again = recovery.prefix_due;
}

// The master before has evicted all members in this epoch, which may be decided. Each of them is
// told why.
void Takeover::end_with(std::uint32_t group, const wire::EpochRecord& last) {
  outbox_.log_rarely("group " + std::to_string(group) + " has ended, without members");
  const auto node = returning_.recoveries.extract(group);
  run_.quiet_since = outbox_.now();
  for (const auto& [seat, id] : gathered(group, node.mapped())) {
    const auto own = std::ranges::find(last.departures, seat.first, &wire::Departure::id);
    connections_.refuse(
        id, Code::evicted,
        own != last.departures.end() ? own->reason : "the run went on without this peer");
  }
  returning_.forget_run();
}

// When this master need not wait any longer for members of the base. The grace of a false epoch
// says nothing about that: its members may all be here. A member that comes late may have applied
// more than the others, and is then put out.
Instant Takeover::enough_since(const Base& base, const std::map<Seat, ConnectionId>& seats) const {
  const std::set<Seat> members =
      seats_of(base.proposed ? std::get<wire::EpochRecord>(base.proposed->what) : base.last.record);
  if (std::ranges::all_of(members, [&](const Seat& seat) { return seats.contains(seat); }))
    return {};
  Instant first = Instant::max();
  for (const auto& [seat, id] : seats)
    if (members.contains(seat)) first = std::min(first, connections_.at(id).since);
  return first == Instant::max() ? Instant{} : first + kTakeoverGrace;
}

// Continues the group's log. The first entry of the new term is an epoch, so the entries of one
// epoch are all of one term: logs that end in the same epoch agree.
void Takeover::take_over(std::uint32_t group, const Base& base, std::vector<wire::LogEntry> entries,
                         Instant now) {
  const Recovery recovery = std::move(returning_.recoveries.at(group));
  const std::map<Seat, ConnectionId> seats = gathered(group, recovery);
  returning_.recoveries.erase(group);
  run_.quiet_since = now;  // members of other groups may be on their way
  std::vector<std::pair<ConnectionId, wire::Join>> newcomers;
  for (const auto& [seat, id] : seats) {
    ControlPeer& connection = connections_.at(id);
    connection.recovers = false;
    connection.asked.reset();
    connection.promise.reset();
    if (connection.join) {
      newcomers.emplace_back(id, std::move(*connection.join));
      connection.join.reset();
    } else {
      connection.group = group;
    }
  }
  Quorum quorum(recovery.term, base.last.record, base.last.applied,
                base.last.applied - entries.size());
  wire::Rejoin last = base.last;
  if (base.proposed) {
    last.record = std::get<wire::EpochRecord>(base.proposed->what);
    last.applied = base.proposed->ordinal;
    entries.push_back(*base.proposed);
    quorum.appended(*base.proposed, now);
  }
  for (const wire::Member& member : last.record.members)
    run_.joins = std::max(run_.joins, member.joined);
  served_.put(group, std::move(quorum));
  const auto here = std::ranges::count_if(seats_of(last.record),
                                          [&](const Seat& seat) { return seats.contains(seat); });
  outbox_.log("group " + std::to_string(group) + ": taken over with term " +
              std::to_string(recovery.term) + " from epoch " + std::to_string(last.record.epoch) +
              "; " + std::to_string(here) + " of " + std::to_string(last.record.members.size()) +
              " members are here");
  // Not in `served_` during rebuild(), which asks for the census.
  auto rebuilt = Group::rebuild(group, options_, around_, last, recovery.reports, entries, now);
  Group& made = *rebuilt;
  served_.put(group, std::move(rebuilt));
  made.begin_term();
  for (const auto& [id, first] : newcomers) {
    ControlPeer* const connection = connections_.open(id);
    if (connection != nullptr && !let_vote(id, *connection, first))
      served_.join(id, *connection, first, now);
  }
  served_.settle(now);
}

}  // namespace pccl::master
