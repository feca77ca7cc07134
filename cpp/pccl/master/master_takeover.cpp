// One of several masters: serves groups while a majority supports it, and takes over groups of a
// master that is gone. docs/internals/several-masters.md has the rules.
#include <algorithm>
#include <set>
#include <utility>

#include "pccl/digest/ticket.h"
#include "pccl/master/master.h"
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

const Quorum* Master::quorum(std::uint32_t group) const {
  const auto it = quorums_.find(group);
  return it == quorums_.end() ? nullptr : &it->second;
}

Quorum* Master::quorum_of(ConnectionId id) {
  if (quorums_.empty()) return nullptr;
  const auto connection = connections_.find(id);
  if (connection == connections_.end() || !connection->second.group) return nullptr;
  const auto it = quorums_.find(*connection->second.group);
  return it == quorums_.end() ? nullptr : &it->second;
}

void Master::appended(std::uint32_t group, const wire::LogEntry& entry) {
  const auto it = quorums_.find(group);
  if (it == quorums_.end()) return;
  it->second.appended(entry, now_);
  if (std::holds_alternative<wire::EpochRecord>(entry.what)) undecided_.insert(group);
}

// -- votes

std::set<Seat> Master::voters(std::uint32_t group, const Quorum& quorum) const {
  std::set<Seat> seats;
  for (const auto& [id, connection] : connections_) {
    if (!connection.closing && connection.group == group && quorum.accepts(connection.seat))
      seats.insert(connection.seat);
  }
  return seats;
}

void Master::hear_vote(const Connection& connection, const wire::Frame& frame) {
  const auto it = quorums_.find(*connection.group);
  if (it == quorums_.end()) return;
  if (std::holds_alternative<wire::Leave>(frame.message)) it->second.left(connection.seat);
  const auto* accept = std::get_if<wire::Accept>(&frame.message);
  if (accept != nullptr && frame.envelope.term == it->second.term())
    it->second.accepted(connection.seat, accept->ordinal);
}

void Master::propose_to(ConnectionId id, const Quorum& quorum) {
  const Connection* const connection = open(id);
  if (connection == nullptr || quorum.proposal() == nullptr || !quorum.accepts(connection->seat))
    return;
  send_now(id, quorum.term(), 0, wire::Propose{*quorum.proposal()});
}

// Proposes what is new, and sends what has been decided.
void Master::settle_quorums(Instant now) {
  for (auto at = undecided_.begin(); at != undecided_.end();) {
    const std::uint32_t group = *at;
    const auto it = quorums_.find(group);
    const bool open = it != quorums_.end() && !settle(group, it->second, now);
    at = open ? std::next(at) : undecided_.erase(at);
  }
}

// True: everything is decided.
bool Master::settle(std::uint32_t group, Quorum& quorum, Instant now) {
  while (quorum.proposal() != nullptr) {
    if (quorum.fresh_proposal()) {
      for (const auto& [id, connection] : connections_)
        if (connection.group == group) propose_to(id, quorum);
    }
    if (!quorum.decide(voters(group, quorum), now)) return false;
    for (const Quorum::Held& held : quorum.released()) {
      if (held.message) {
        send_now(held.to, quorum.term(), held.collected, *held.message);
      } else {
        close_now(held.to);
      }
    }
  }
  return true;
}

void Master::check_quorums(Instant now) {
  if (options_.place.alone()) return;
  const bool frozen = last_tick_ != Instant{} && now - last_tick_ > options_.heartbeat_timeout / 2;
  last_tick_ = now;
  if (!quiet_since_) quiet_since_ = now;
  std::map<std::uint32_t, std::set<Seat>> here;
  for (const auto& [id, connection] : connections_) {
    if (connection.closing || !connection.group) continue;
    const auto it = quorums_.find(*connection.group);
    if (it != quorums_.end() && it->second.accepts(connection.seat))
      here[it->first].insert(connection.seat);
  }
  bool alone = true;  // no group that is no pair has its majority here
  std::vector<std::uint32_t> hopeless;
  for (auto& [group, quorum] : quorums_) {
    if (frozen) quorum.excuse(now);
    const Group& known = *groups_.at(group);
    if (known.record().epoch == 0) continue;
    if (quorum.hopeless(here[group], options_.heartbeat_timeout, now)) {
      hopeless.push_back(group);
    } else if (group < kFirstPair && !known.empty() && quorum.has_majority()) {
      alone = false;
    }
  }
  const bool only_pairs = std::ranges::all_of(hopeless, [](auto id) { return id >= kFirstPair; });
  if (alone && !only_pairs) return step_down("a majority of the members cannot be reached");
  for (const std::uint32_t group : hopeless) give_up(group);
}

// Forgets this group only: the others have their members here, and do not depend on it. Its members
// may go on at another master. A group that begins here with its number has a higher term, so they
// do not take it for their own.
void Master::give_up(std::uint32_t group) {
  if (group < kFirstPair) {
    log("group " + std::to_string(group) +
        ": this master gives it up: a majority of its members cannot be reached");
    quiet_since_ = now_;
  }
  for (auto& [id, connection] : connections_) {
    if (connection.group != group) continue;
    connection.group.reset();
    close_now(id);
  }
  if (group < kFirstPair) given_up_ = std::max(given_up_, quorums_.at(group).term());
  groups_.erase(group);
  quorums_.erase(group);
  undecided_.erase(group);
}

// Forgets all groups. Their members go to the next master.
void Master::step_down(const std::string& why) {
  log("this master steps down: " + why);
  for (auto& [id, connection] : connections_) {
    if (!connection.group) continue;
    connection.group.reset();
    close_now(id);
  }
  quorums_.clear();
  groups_.clear();
  undecided_.clear();
  quiet_since_ = now_;
  admission_paused_ = false;  // the master that takes over does not know of it
  // The run may go on elsewhere: this master must not begin another one with the same id.
  if (run_ == own_run_) own_run_ = next_run(own_run_);
  forget_run();
}

void Master::forget_run() {
  if (!recoveries_.empty()) return;
  if (!std::ranges::all_of(groups_, [&](const auto& item) { return is_over(item.first); })) return;
  if (run_ != own_run_) {
    quorums_.clear();
    groups_.clear();
  }
  run_ = own_run_;
  admission_paused_ = false;
}

// -- newcomers

void Master::join_one(ConnectionId id, Connection& connection, const wire::Frame& frame,
                      Instant now) {
  const auto& first = std::get<wire::Join>(frame.message);
  if (first.ranks_per_replica > 0)
    return refuse(id, Code::refused, "replicas need a run with one master address");
  connection.term = frame.envelope.term;
  connection.seat = {first.id, digest::seal_of(first.ticket)};
  const bool same_run = frame.envelope.run == 0 || frame.envelope.run == run_;
  if (const auto open = recoveries_.find(first.group); open != recoveries_.end()) {
    if (same_run && wanted(open->second, connection.seat)) {
      connection.join = first;
      connection.recovers = true;
      open->second.changed = true;
      if (open->second.term != 0) ask_promise(id, connection, open->second);
      return take_over_if_ready(first.group, now);
    }
    send_now(id, term_, 0, wire::NotServing{true});
    return close_now(id);
  }
  const Group* const known = group(first.group);
  const bool serves =
      known != nullptr && !known->empty() && (known->record().epoch > 0 || connection.may_found);
  // Only the first master begins runs, and only for peers that found no other one.
  // Members of a run that this master served before may not have reached another one.
  const bool quiet = quiet_since_ && now - *quiet_since_ >= quiet_time();
  const bool founds =
      options_.place.index == 0 && connection.may_found && run_ == own_run_ && quiet;
  // Own groups begin where the run is. Their numbers are random, and those that enter one have
  // told each other the number, so nobody waits for a group of that number at another master.
  const bool own = first.group >= kOwnGroups && serves_a_run() && quiet;
  if (!same_run || !(serves || founds || own)) {
    send_now(id, term_, 0, wire::NotServing{serves || !quiet});
    return close_now(id);
  }
  if (!let_vote(id, connection, first)) join(id, connection, first, now);
  if (const auto it = quorums_.find(first.group); it != quorums_.end()) propose_to(id, it->second);
  settle_quorums(now);
}

// Whether members of a group have begun here, or were taken over.
bool Master::serves_a_run() const {
  return std::ranges::any_of(groups_, [](const auto& item) {
    const auto& [id, group] = item;
    return id < kFirstPair && !group->empty() && group->record().epoch > 0;
  });
}

// A peer that was admitted and does not know it has a vote on the epoch that removes it again. It
// gets the log up to there. False: it is no such peer.
bool Master::let_vote(ConnectionId id, Connection& connection, const wire::Join& first) {
  const auto it = quorums_.find(first.group);
  const auto group = groups_.find(first.group);
  if (it == quorums_.end() || group == groups_.end()) return false;
  const Quorum& quorum = it->second;
  const auto is_this = [&](const wire::Member& member) {
    return member.id == connection.seat.first && member.seal == connection.seat.second;
  };
  if (quorum.proposal() == nullptr || !quorum.accepts(connection.seat) ||
      std::ranges::any_of(group->second->record().members, is_this))
    return false;
  std::vector<wire::LogEntry> entries;
  std::uint64_t joined = 0;
  for (const wire::LogEntry& entry : group->second->log().entries()) {
    if (entry.ordinal >= quorum.proposal()->ordinal) break;
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
  send_now(id, quorum.term(), 0, wire::Welcome{joined, true, 0, {}});
  for (auto& part : wire::in_parts(std::move(entries)))
    send_now(id, quorum.term(), 0, wire::Log{std::move(part)});
  // These wait until it is decided.
  send(id, 0, wire::Refused{Code::evicted, "the run went on without this peer"});
  close(id);
  return true;
}

// -- returning members

void Master::rejoin_one(ConnectionId id, Connection& connection, const wire::Frame& frame,
                        Instant now) {
  const auto& rejoin = std::get<wire::Rejoin>(frame.message);
  if (const Status sound = check(rejoin, options_); !sound)
    return refuse(id, sound.error().code, sound.error().reason);
  const bool same_run = frame.envelope.run == run_;
  const std::uint32_t ahead = kMaxTermsAhead * options_.place.masters;
  connection.term = frame.envelope.term;
  connection.seat = {rejoin.id, digest::seal_of(rejoin.ticket)};
  const auto it = quorums_.find(rejoin.group);
  if (it != quorums_.end() && groups_.at(rejoin.group)->record().epoch > 0) {
    const Quorum& quorum = it->second;
    if (!same_run) return close_now(id);
    if (foreign(rejoin.group, connection.seat)) return appeal(id, connection, rejoin, now);
    if (frame.envelope.term <= quorum.term()) {
      return_to(id, connection, rejoin, nullptr, now);
      return settle_quorums(now);
    }
    // Another master asked for its promise.
    if (!quorum.accepts(connection.seat) || frame.envelope.term > quorum.term() + ahead)
      return close_now(id);
    // False reports of one member must not keep the run busy with takeovers.
    if (step_downs_.size() > options_.limits.max_peers) step_downs_.clear();
    if (!step_downs_[connection.seat].take(kStepDowns, now)) return close_now(id);
    step_down("a member has followed a master of term " + std::to_string(frame.envelope.term));
  }
  if (frame.envelope.term > kMaxTerm) return close_now(id);
  if ((!same_run || it != quorums_.end()) && !give_way()) return close_now(id);
  Returned returned(id, rejoin);
  const auto open = recoveries_.find(rejoin.group);
  if (open != recoveries_.end()) {
    // Terms are finite: a false one must not use them up.
    if (open->second.term != 0 && connection.term > open->second.term + ahead) return close_now(id);
    for (const Returned& other : open->second.reports)
      if (returned.share(other)) break;
  }
  if (!room_for(returned)) {
    log_rarely("too many members return at the same time", now);
    return close_now(id);
  }
  run_ = frame.envelope.run;
  groups_.erase(rejoin.group);  // it has no members here
  quorums_.erase(rejoin.group);
  Recovery& recovery = recoveries_[rejoin.group];
  if (recovery.reports.empty()) recovery.since = now;
  add_report(recovery, std::move(returned));
  recovery.changed = true;
  connection.recovers = true;
  for (const wire::Member& member : rejoin.record.members) joins_ = std::max(joins_, member.joined);
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
std::map<Seat, ConnectionId> Master::gathered(std::uint32_t group, const Recovery& recovery) const {
  std::map<Seat, ConnectionId> seats;
  for (const auto& [id, connection] : connections_) {
    if (!connection.closing && connection.recovers && connection.join &&
        connection.join->group == group)
      seats[connection.seat] = id;
  }
  for (const Returned& one : recovery.reports) seats[one.seat()] = one.connection();
  return seats;
}

// Whether this newcomer may be a member of the last epoch without knowing it.
bool Master::wanted(const Recovery& recovery, const Seat& seat) const {
  std::set<const void*> seen;
  const auto has = [&](const std::vector<Seat>& members) {
    return std::ranges::find(members, seat) != members.end();
  };
  for (const Returned& one : recovery.reports) {
    if (seen.insert(one.record()).second && has(one.members())) return true;
    const auto& promise = connections_.at(one.connection()).promise;
    if (promise && promise->accepted && seen.insert(promise->accepted.get()).second &&
        has(promise->accepted->members()))
      return true;
  }
  return false;
}

// Ends a run that has not begun, for one that has. False: this master is busy with another one.
bool Master::give_way() {
  const bool begun = std::ranges::any_of(groups_, [](const auto& item) {
    return !item.second->empty() && item.second->record().epoch > 0;
  });
  if (begun || !recoveries_.empty()) return false;
  for (auto& [id, connection] : connections_) {
    if (!connection.group) continue;
    log_rarely("members of another run return to this master; newcomers must wait", now_);
    connection.group.reset();
    send_now(id, term_, 0, wire::NotServing{true});
    close_now(id);
  }
  groups_.clear();
  quorums_.clear();
  undecided_.clear();
  admission_paused_ = false;  // it was of the run that has not begun
  return true;
}

void Master::ask_promise(ConnectionId id, Connection& connection, const Recovery& recovery) {
  connection.promise.reset();
  connection.term = recovery.term;
  send_now(id, recovery.term, 0, wire::AskPromise{});
}

// Asks for promises to a term above all that these peers have followed.
void Master::ask_promises(std::uint32_t group, Recovery& recovery, Instant now) {
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
  recovery.term = options_.place.term_after(highest);
  // A false term must not make this master serve with one that members know from it.
  while (served_terms_.contains(recovery.term))
    recovery.term = options_.place.term_after(recovery.term);
  recovery.promises_since = now;
  recovery.changed = true;
  recovery.waited = false;
  for (const auto& [seat, id] : seats) ask_promise(id, connections_.at(id), recovery);
}

void Master::promised(ConnectionId id, Connection& connection, const wire::Frame& frame,
                      Instant now) {
  const auto& promise = std::get<wire::Promise>(frame.message);
  for (auto& [group, recovery] : recoveries_) {
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
        refuse(id, Code::evicted, "its promise is inconsistent");
        return forget_report(id);
      }
      made.accepted = std::make_shared<const AcceptedEpoch>(accepted);
      for (const Returned& other : recovery.reports) {
        const auto& theirs = connections_.at(other.connection()).promise;
        if (theirs && theirs->accepted && *theirs->accepted == *made.accepted) {
          made.accepted = theirs->accepted;
          break;
        }
      }
    }
    connection.promise = std::move(made);
    if (reported_bytes({}) > options_.limits.max_reported_bytes) {
      log_rarely("too many members return at the same time", now);
      close_now(id);
      return forget_report(id);
    }
    recovery.changed = true;
    return take_over_if_ready(group, now);
  }
}

// -- the takeover

// One claim for each epoch that is reported, and one for each that was accepted.
std::vector<Master::Claim> Master::claims(const Recovery& recovery) const {
  std::vector<Claim> claims;
  std::map<const void*, std::size_t> of_record;
  const auto promise_of = [&](const Returned& one) -> const std::optional<Promised>& {
    return connections_.at(one.connection()).promise;
  };
  const auto rank = [&](const Returned& one) {
    return std::pair(promise_of(one).has_value(), one.at());
  };
  for (const Returned& one : recovery.reports) {
    const auto [known, fresh] = of_record.try_emplace(one.record(), claims.size());
    if (fresh) {
      // Records of one epoch may differ in what came after it.
      const auto same = std::ranges::find_if(claims, [&](const Claim& claim) {
        return claim.epoch == one.at().first && claim.hash == one.members_hash() &&
               *claim.members == one.members();
      });
      known->second = static_cast<std::size_t>(same - claims.begin());
      if (same == claims.end())
        claims.push_back({one.at().first, one.members_hash(), &one.members(), nullptr, 0, nullptr});
    }
    Claim& claim = claims[known->second];
    ++claim.supporters;
    if (claim.best == nullptr || rank(*claim.best) < rank(one)) claim.best = &one;
  }
  std::set<const void*> seen;
  for (const Returned& one : recovery.reports) {
    const auto& promise = promise_of(one);
    if (!promise || !promise->accepted || !seen.insert(promise->accepted.get()).second) continue;
    const AcceptedEpoch& accepted = *promise->accepted;
    claims.push_back(
        {accepted.epoch(), accepted.members_hash(), &accepted.members(), &one, 0, &accepted});
  }
  return claims;
}

Master::Knowledge Master::knowledge(const Recovery& recovery) const {
  Knowledge known;
  for (const Returned& one : recovery.reports) {
    const auto& promise = connections_.at(one.connection()).promise;
    if (promise) known[one.seat()] = {one.at().first, one.at().first + (promise->accepted ? 1 : 0)};
  }
  for (const auto& [id, connection] : connections_) {
    if (connection.join && connection.recovers && connection.promise)
      known.try_emplace(connection.seat);
  }
  return known;
}

// An epoch is *closed* if a majority of its members has promised and knows of no later one. Then no
// later one is decided, nor ever will be in an earlier term.
bool Master::closed(const Claim& claim, const Knowledge& known) {
  const auto count = std::ranges::count_if(*claim.members, [&](const Seat& seat) {
    const auto it = known.find(seat);
    return it != known.end() && it->second.newest <= claim.epoch;
  });
  return static_cast<std::size_t>(count) >= majority_of(claim.members->size());
}

// The proposal after this epoch that may be decided. Null: there is none, or it is not closed. No
// other one is decided if a majority of the epoch's members has promised and applied nothing later.
// One without members is closed: nothing follows.
const Master::Claim* Master::proposal_after(const Claim& claim, const std::vector<Claim>& all,
                                            const Knowledge& known) {
  const auto electors = std::ranges::count_if(*claim.members, [&](const Seat& seat) {
    const auto it = known.find(seat);
    return it != known.end() && it->second.applied <= claim.epoch;
  });
  if (static_cast<std::size_t>(electors) < majority_of(claim.members->size())) return nullptr;
  const Claim* newest = nullptr;
  for (const Claim& proposal : all) {
    const bool follows = proposal.proposed != nullptr && proposal.epoch == claim.epoch + 1 &&
                         claim.hash == proposal.best->members_hash() &&
                         *claim.members == proposal.best->members();
    if (follows && (newest == nullptr || proposal.proposed->term() > newest->proposed->term()))
      newest = &proposal;
  }
  if (newest == nullptr || newest->members->empty()) return newest;
  return closed(*newest, known) ? newest : nullptr;
}

// Empty: promises are missing. If all reports are true there is exactly one closed epoch that a
// member has applied; or none, and one proposal that may be decided. A false epoch needs more
// supporters than the true one.
std::optional<Master::Base> Master::choose_base(const Recovery& recovery) const {
  const Knowledge known = knowledge(recovery);
  const std::vector<Claim> all = claims(recovery);
  const auto better = [](const Claim& claim, const Claim* than) {
    return than == nullptr ||
           std::pair(claim.supporters, claim.epoch) > std::pair(than->supporters, than->epoch);
  };
  const Claim* last = nullptr;    // closed
  const Claim* before = nullptr;  // the epoch before `next`
  const Claim* next = nullptr;
  for (const Claim& claim : all) {
    if (claim.proposed != nullptr) continue;
    if (better(claim, last) && closed(claim, known) && known.contains(claim.best->seat()))
      last = &claim;
    if (!better(claim, before)) continue;
    if (const Claim* const proposal = proposal_after(claim, all, known)) {
      before = &claim;
      next = proposal;
    }
  }
  // Both: `last` is one of the two epochs on the other side, or one of the sides is false.
  const bool same = next != nullptr && last != nullptr && last->epoch == next->epoch &&
                    last->hash == next->hash && *last->members == *next->members;
  if (last != nullptr &&
      (next == nullptr || same || last == before || last->supporters >= before->supporters))
    return Base{last->best->rejoin(), std::nullopt, last->best->connection()};
  if (next == nullptr) return std::nullopt;
  return Base{next->best->rejoin(), next->proposed->entry(), next->best->connection()};
}

void Master::take_over_if_ready(std::uint32_t group, Instant now) {
  const auto it = recoveries_.find(group);
  if (it == recoveries_.end()) return;
  Recovery& recovery = it->second;
  if (now - recovery.since >= options_.reconnect_timeout) {
    log("group " + std::to_string(group) + ": too few members came to this master");
    const auto reports = std::move(recovery.reports);
    const auto seats = gathered(group, recovery);
    recoveries_.erase(it);
    quiet_since_ = now_;
    for (const auto& [seat, id] : seats) close_now(id);
    for (const Returned& one : reports) close_now(one.connection());
    return forget_run();
  }
  // With many reports the rest takes time. Its result changes with these two only.
  const Instant since = recovery.term == 0 ? recovery.since : recovery.promises_since;
  const bool waited = now - since >= kTakeoverGrace;
  const bool first_time = std::exchange(recovery.waited, waited) != waited;
  const bool again = recovery.again && now >= *recovery.again;
  if (again) recovery.again.reset();
  if (std::exchange(recovery.changed, false) || first_time || again)
    consider_takeover(group, recovery, now);
}

void Master::consider_takeover(std::uint32_t group, Recovery& recovery, Instant now) {
  const std::map<Seat, ConnectionId> seats = gathered(group, recovery);
  if (recovery.term == 0) {
    // No term is used up before a majority is here.
    for (const Claim& claim : claims(recovery)) {
      const auto here = static_cast<std::size_t>(std::ranges::count_if(
          *claim.members, [&](const Seat& seat) { return seats.contains(seat); }));
      const bool complete = here == claim.members->size();
      if (here < majority_of(claim.members->size()) || (!complete && !recovery.waited)) continue;
      return ask_promises(group, recovery, now);
    }
    return;
  }
  const bool all = std::ranges::all_of(
      seats, [&](const auto& item) { return connections_.at(item.second).promise.has_value(); });
  if (!all && !recovery.waited) return;
  const std::optional<Base> base = choose_base(recovery);
  if (!base) return;
  if (const Instant enough = enough_since(*base, seats); now < enough) {
    recovery.again = enough;
    return;
  }
  if (base->proposed) {
    const auto& record = std::get<wire::EpochRecord>(base->proposed->what);
    if (record.members.empty()) return end_with(group, record);
  }
  Connection& source = connections_.at(base->source);
  if (!source.asked) return ask_for_log(base->source, source, base->last, now);
  if (!source.asked->complete) return;
  take_over(group, *base, now);
}

// The master before has evicted all members in this epoch, which may be decided. Each of them is
// told why.
void Master::end_with(std::uint32_t group, const wire::EpochRecord& last) {
  log_rarely("group " + std::to_string(group) + " has ended, without members", now_);
  const auto node = recoveries_.extract(group);
  quiet_since_ = now_;
  for (const auto& [seat, id] : gathered(group, node.mapped())) {
    const auto own = std::ranges::find(last.departures, seat.first, &wire::Departure::id);
    refuse(id, Code::evicted,
           own != last.departures.end() ? own->reason : "the run went on without this peer");
  }
  forget_run();
}

// When this master need not wait any longer for members of the base. The grace of a false epoch
// says nothing about that: its members may all be here. A member that comes late may have applied
// more than the others, and is then put out.
Instant Master::enough_since(const Base& base, const std::map<Seat, ConnectionId>& seats) const {
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
void Master::take_over(std::uint32_t group, const Base& base, Instant now) {
  const Recovery recovery = std::move(recoveries_.at(group));
  const std::map<Seat, ConnectionId> seats = gathered(group, recovery);
  std::vector<wire::LogEntry> entries = connections_.at(base.source).asked->log();
  recoveries_.erase(group);
  quiet_since_ = now;  // members of other groups may be on their way
  std::vector<std::pair<ConnectionId, wire::Join>> newcomers;
  for (const auto& [seat, id] : seats) {
    Connection& connection = connections_.at(id);
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
  for (const wire::Member& member : last.record.members) joins_ = std::max(joins_, member.joined);
  quorums_.insert_or_assign(group, std::move(quorum));
  served_terms_.insert(recovery.term);
  if (served_terms_.size() > kMaxServedTerms) served_terms_.erase(served_terms_.begin());
  const auto here = std::ranges::count_if(seats_of(last.record),
                                          [&](const Seat& seat) { return seats.contains(seat); });
  log("group " + std::to_string(group) + ": taken over with term " + std::to_string(recovery.term) +
      " from epoch " + std::to_string(last.record.epoch) + "; " + std::to_string(here) + " of " +
      std::to_string(last.record.members.size()) + " members are here");
  // Not in `groups_` during rebuild(), which asks for the census.
  auto rebuilt = Group::rebuild(group, options_, *this, last, recovery.reports, entries, now);
  Group& made = *rebuilt;
  groups_[group] = std::move(rebuilt);
  made.begin_term();
  for (const auto& [id, first] : newcomers) {
    Connection* const connection = open(id);
    if (connection != nullptr && !let_vote(id, *connection, first))
      join(id, *connection, first, now);
  }
  settle_quorums(now);
}

}  // namespace pccl::master
