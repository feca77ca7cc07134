// Members that return: to their group, or to a master that was restarted and rebuilds the group.
#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "pccl/base/name.h"
#include "pccl/digest/ticket.h"
#include "pccl/master/master.h"
#include "pccl/master/reports.h"
#include "pccl/topology/plan.h"

namespace pccl::master {
namespace {

// How long a restarted master waits for more members once a majority has returned.
constexpr Duration kRecoveryGrace = std::chrono::seconds(1);

constexpr const char* kAnotherRun = "this master serves another run";

// REQUIRES: its record is plausible; otherwise names may be anything.
std::string name_of(const wire::Rejoin& rejoin) {
  return wire::shown_name(rejoin.record.members, rejoin.id);
}

// How many members of the last epoch have returned, and how many it has. REQUIRES: reports is not
// empty.
std::pair<std::size_t, std::size_t> count_back(const std::vector<Returned>& reports) {
  const Returned* last = nullptr;
  std::set<Seat> seats;
  for (const Returned& one : reports) {
    if (last == nullptr || one.at().first > last->at().first) last = &one;
    seats.insert(one.seat());
  }
  const std::vector<Seat>& members = last->members();
  const auto back =
      std::ranges::count_if(members, [&](const Seat& seat) { return seats.contains(seat); });
  return {static_cast<std::size_t>(back), members.size()};
}

Status wrong_report(const std::string& who, const std::string& what = {}) {
  return Status(Code::evicted, "the report of peer " + who + " is inconsistent" + what);
}

}  // namespace

bool plausible(const wire::EpochRecord& record, const Options& options) {
  std::set<PeerId> ids;
  for (const wire::Member& member : record.members) {
    if (member.id.empty() || !ids.insert(member.id).second || member.joined > kMaxCount ||
        !(member.name.empty() || valid_name(member.name)))
      return false;
  }
  return !ids.empty() && ids.size() <= options.limits.max_peers && record.epoch <= kMaxCount &&
         record.points <= kMaxCount && topology::valid(record.plan, ids.size());
}

Status check(const wire::Rejoin& rejoin, const Options& options) {
  const auto& members = rejoin.record.members;
  const PeerId seal = digest::seal_of(rejoin.ticket);
  const bool member = std::ranges::any_of(
      members, [&](const auto& known) { return known.id == rejoin.id && known.seal == seal; });
  if (!member || !plausible(rejoin.record, options) || rejoin.applied > kMaxCount)
    return wrong_report(rejoin.id.brief());
  if (const Status relays = wire::check_relays(rejoin.record); !relays)
    return wrong_report(name_of(rejoin), ": " + relays.error().reason);
  return {};
}

Status check_log(const wire::Rejoin& rejoin, const std::vector<wire::LogEntry>& log,
                 const Options& options) {
  if (log.size() > rejoin.applied) return wrong_report(name_of(rejoin));
  std::uint64_t ordinal = rejoin.applied - log.size();
  for (const wire::LogEntry& entry : log) {
    const auto* record = std::get_if<wire::EpochRecord>(&entry.what);
    if (entry.ordinal != ++ordinal || (record != nullptr && !plausible(*record, options)))
      return wrong_report(name_of(rejoin));
    if (record == nullptr) continue;
    if (const Status relays = wire::check_relays(*record); !relays)
      return wrong_report(name_of(rejoin), ": " + relays.error().reason);
  }
  return {};
}

// A member returns to an existing group.
void Master::return_to(ConnectionId id, Connection& connection, const wire::Rejoin& rejoin,
                       const std::vector<wire::LogEntry>* log, Instant now) {
  connection.group = rejoin.group;
  switch (groups_.at(rejoin.group)->rejoin(id, rejoin, connection.term, log, now)) {
    case Group::Return::in:
      if (const auto it = quorums_.find(rejoin.group); it != quorums_.end())
        propose_to(id, it->second);
      return;
    case Group::Return::needs_log:
      connection.group.reset();
      return ask_for_log(id, connection, rejoin, now);
    case Group::Return::out:
      connection.group.reset();
      // Its eviction may not be decided yet: it asks again, here or elsewhere.
      if (const auto it = quorums_.find(rejoin.group); it != quorums_.end()) {
        if (it->second.proposal() != nullptr) return close_now(id);
        connection.term = std::max(connection.term, it->second.term());
      }
      return refuse(id, Code::evicted, "the run went on without this peer");
  }
}

// A member has one deadline for its log, however often it returns: the others wait for it.
void Master::ask_for_log(ConnectionId id, Connection& connection, const wire::Rejoin& rejoin,
                         Instant now) {
  Returned report(id, rejoin);
  const auto recovery = recoveries_.find(rejoin.group);
  const Instant since = recovery == recoveries_.end()
                            ? now
                            : recovery->second.asked.try_emplace(report.seat(), now).first->second;
  for (const auto& [other, earlier] : connections_) {
    if (other != id && earlier.asked && earlier.asked->report.seat() == report.seat()) close(other);
  }
  connection.recovers = true;
  connection.asked = AskedLog{std::move(report), rejoin.group, since, {}, 0, 0, false};
  send_now(id, recovery == recoveries_.end() ? term_ : std::max(term_, recovery->second.term), 0,
           wire::RequestLog{});
}

void Master::log_part(ConnectionId id, Connection& connection, const wire::LogPart& part,
                      Instant now) {
  AskedLog& asked = *connection.asked;
  const std::uint32_t group = asked.group;
  const auto refused = [&](const Status& why) {
    refuse(id, why.error().code, why.error().reason);
    forget_report(id);
    recover_if_ready(group, now);
  };
  if (asked.complete || (part.entries.empty() && !part.last))
    return refused(wrong_report(name_of(asked.report.rejoin())));
  if (asked.entries + part.entries.size() > options_.limits.max_behind + 1)
    return refused(wrong_report(name_of(asked.report.rejoin()), ": its log is too long"));
  wire::Bytes bytes = wire::encoded(part);
  if (reported_bytes({}) + bytes.size() > options_.limits.max_reported_bytes) {
    log_rarely("too many members return at the same time", now);
    return close(id);  // the member will try again
  }
  asked.bytes += bytes.size();
  asked.entries += part.entries.size();
  asked.parts.push_back(std::move(bytes));
  if (!part.last) return;
  asked.complete = true;
  if (const auto it = recoveries_.find(group); it != recoveries_.end()) it->second.changed = true;
  const wire::Rejoin rejoin = asked.report.rejoin();
  const std::vector<wire::LogEntry> entries = asked.log();
  if (const Status sound = check_log(rejoin, entries, options_); !sound) return refused(sound);
  if (recoveries_.contains(group)) return recover_if_ready(group, now);
  connection.asked.reset();
  connection.recovers = false;
  if (groups_.contains(group)) return return_to(id, connection, rejoin, &entries, now);
  close(id);  // the group has ended meanwhile; the member will try again
}

std::vector<wire::LogEntry> Master::AskedLog::log() const {
  std::vector<wire::LogEntry> whole;
  whole.reserve(entries);
  for (const wire::Bytes& encoded : parts) {
    wire::Reader reader(encoded);
    wire::LogPart part;
    reader(part);
    std::move(part.entries.begin(), part.entries.end(), std::back_inserter(whole));
  }
  return whole;
}

void Master::rejoin(ConnectionId id, Connection& connection, const wire::Frame& frame,
                    Instant now) {
  const auto& rejoin = std::get<wire::Rejoin>(frame.message);
  if (connection.recovers) return on_garbage(id, {Code::refused, "a second Rejoin"}, now);
  if (const Status sound = check(rejoin, options_); !sound)
    return refuse(id, sound.error().code, sound.error().reason);
  const bool same_run = frame.envelope.run == run_;
  const bool known = groups_.contains(rejoin.group);
  connection.term = frame.envelope.term;
  if (same_run && frame.envelope.term == term_ && known)
    return return_to(id, connection, rejoin, nullptr, now);
  // A member of another master. It may return here if this master has no run of its own; this
  // master then continues that run with a higher term.
  if (!same_run && (!groups_.empty() || !formers_.empty())) {
    if (!may_still_return(now)) return refuse(id, Code::evicted, kAnotherRun);
    return keep_former(id, connection, Returned(id, rejoin), frame.envelope, now);
  }
  if (frame.envelope.term > (same_run ? term_ + kMaxTermsAhead : kMaxTerm)) {
    return refuse(id, Code::evicted,
                  "peer " + name_of(rejoin) + " reports a master of term " +
                      std::to_string(frame.envelope.term) + ", and this one has term " +
                      std::to_string(term_));
  }
  if (known) return return_to(id, connection, rejoin, nullptr, now);
  if (const std::string why_not = replicas_.objection(rejoin); !why_not.empty())
    return refuse(id, Code::evicted, why_not);
  Returned returned(id, rejoin);
  const auto open = recoveries_.find(rejoin.group);
  if (open != recoveries_.end()) {
    for (const Returned& other : open->second.reports)
      if (returned.share(other)) break;
  }
  if (!room_for(returned)) {
    log_rarely("too many members return at the same time", now);
    return close(id);  // the member will try again
  }
  if (!same_run) {
    if (!recoveries_.empty()) return refuse(id, Code::evicted, kAnotherRun);
    run_ = frame.envelope.run;
  }
  term_ = std::max(term_, frame.envelope.term + 1);
  replicas_.recover(rejoin.record.ranks_per_replica, now);
  Recovery& recovery = recoveries_[rejoin.group];
  if (recovery.reports.empty()) recovery.since = now;
  const auto asked = recovery.asked.find(returned.seat());
  if (asked != recovery.asked.end() && now - asked->second >= kHandshakeTimeout)
    return refuse(id, Code::evicted, "its log did not arrive within the handshake timeout");
  add_report(recovery, std::move(returned));
  connection.recovers = true;
  for (const wire::Member& member : rejoin.record.members) joins_ = std::max(joins_, member.joined);
  recover_if_ready(rejoin.group, now);
}

// Replaces an earlier report of the member, which returned again before the master noticed that its
// connection was gone. (A report of the same id with another seal is kept: only the rebuilt group
// can tell which one is the member.)
void Master::add_report(Recovery& recovery, Returned returned) {
  for (const Returned& before : recovery.reports)
    if (before.seat() == returned.seat()) close_now(before.connection());
  std::erase_if(recovery.reports,
                [&](const Returned& before) { return before.seat() == returned.seat(); });
  recovery.reports.push_back(std::move(returned));
}

// Memory of the reports of members that wait, except the report of `without`.
std::size_t Master::reported_bytes(const Seat& without) const {
  std::size_t bytes = 0;
  std::set<const void*> records;
  const auto count = [&](const Returned& one) {
    if (one.seat() != without && records.insert(one.record()).second) bytes += one.record_bytes();
  };
  for (const auto* waiting : {&recoveries_, &appeals_}) {
    for (const auto& [group, recovery] : *waiting) std::ranges::for_each(recovery.reports, count);
  }
  for (const auto& [id, former] : formers_) count(former.report);
  for (const auto& [id, connection] : connections_) {
    if (connection.asked)
      bytes += connection.asked->bytes + connection.asked->report.record_bytes();
    if (connection.promise && connection.promise->accepted &&
        records.insert(connection.promise->accepted.get()).second)
      bytes += connection.promise->accepted->bytes();
  }
  return bytes;
}

bool Master::room_for(const Returned& more) const {
  std::size_t count = 1;
  bool shared = false;
  const auto look = [&](const Returned& one) {
    if (one.seat() == more.seat()) return;  // it will be replaced
    ++count;
    shared = shared || one.record() == more.record();
  };
  for (const auto* waiting : {&recoveries_, &appeals_}) {
    for (const auto& [group, recovery] : *waiting) std::ranges::for_each(recovery.reports, look);
  }
  for (const auto& [id, former] : formers_) look(former.report);
  const std::size_t bytes = shared ? 0 : more.record_bytes();
  return count <= options_.limits.max_recovering &&
         reported_bytes(more.seat()) + bytes <= options_.limits.max_reported_bytes;
}

void Master::forget_report(ConnectionId id) {
  for (auto& [group, appeals] : appeals_)
    std::erase_if(appeals.reports, [&](const Returned& one) { return one.connection() == id; });
  for (auto& [group, recovery] : recoveries_) {
    std::erase_if(recovery.reports, [&](const Returned& one) { return one.connection() == id; });
    recovery.changed = true;
  }
  const std::size_t ended =
      std::erase_if(recoveries_, [](const auto& item) { return item.second.reports.empty(); });
  if (options_.place.alone()) {
    if (groups_.empty() && recoveries_.empty()) run_ = own_run_;
    return;
  }
  if (ended > 0) quiet_since_ = now_;
  forget_run();
}

// Rebuilds a group once a majority of its last epoch has returned (at once if all members have) and
// the member with the newest log has sent it.
void Master::recover_if_ready(std::uint32_t group_id, Instant now) {
  if (!options_.place.alone()) return take_over_if_ready(group_id, now);
  const auto it = recoveries_.find(group_id);
  if (it == recoveries_.end()) return;
  Recovery& recovery = it->second;
  const auto [back, all] = count_back(recovery.reports);
  if (back * 2 <= all && now - recovery.since >= options_.reconnect_timeout) {
    // Newcomers must not wait for the other members for ever.
    log({true, group_id, recovery.reports.front().at().first,
         "only " + std::to_string(back) + " of " + std::to_string(all) +
             " members returned; that run is over"});
    const auto reports = std::move(recovery.reports);
    recoveries_.erase(it);
    for (const Returned& one : reports) {
      refuse(one.connection(), Code::evicted,
             "too few members of the run returned to the restarted master");
    }
    if (groups_.empty() && recoveries_.empty()) run_ = own_run_;
    return;
  }
  if (back * 2 <= all || (back < all && now - recovery.since < kRecoveryGrace)) return;
  const Returned& best = newest(recovery.reports);
  Connection& source = connections_.at(best.connection());
  if (!source.asked) return ask_for_log(best.connection(), source, best.rejoin(), now);
  if (!source.asked->complete) return;
  const std::vector<wire::LogEntry> entries = source.asked->log();
  const std::vector<Returned> reports = std::move(recovery.reports);
  recoveries_.erase(it);
  for (const Returned& one : reports) {
    Connection& connection = connections_.at(one.connection());
    connection.group = group_id;
    connection.recovers = false;
    connection.asked.reset();
  }
  log({false, group_id, newest(reports).at().first,
       "rebuilt from the reports of " + std::to_string(back) + " of " + std::to_string(all) +
           " members"});
  // Not in `groups_` during rebuild(), which asks for the census.
  auto group = Group::rebuild(group_id, options_, *this, reports, entries, now);
  group->rebuilt_in(term_);
  groups_[group_id] = std::move(group);
}

// -- newcomers that were faster than the members of the run

// Whether members of an earlier run may still come back to this restarted master, which has begun
// another one.
bool Master::may_still_return(Instant now) const {
  return run_ == own_run_ && now - began_ < options_.reconnect_timeout;
}

// Whether a newcomer of an earlier run has to expect its members here.
bool Master::are_on_their_way(Instant now) const { return now - began_ < quiet_time(); }

void Master::keep_former(ConnectionId id, Connection& connection, Returned report,
                         const wire::Envelope& envelope, Instant now) {
  for (const auto& [other, former] : formers_)
    if (report.share(former.report)) break;
  if (!room_for(report)) {
    log_rarely("too many members return at the same time", now);
    return close(id);  // the member will try again
  }
  std::erase_if(formers_, [&](const auto& item) {  // it has returned before, as add_report() has it
    if (item.second.report.seat() != report.seat()) return false;
    close_now(item.first);
    return true;
  });
  connection.recovers = true;
  formers_.emplace(id, Former{std::move(report), envelope});
  settle_formers(now);
}

// The run of which a majority of a group is back, and which has at least as many members here as
// the one that newcomers have begun. The run does not depend on pairs.
std::optional<std::uint64_t> Master::run_that_is_back() {
  std::map<std::uint64_t, std::map<std::uint32_t, std::vector<Returned>>> runs;
  for (const auto& [id, former] : formers_) {
    if (former.report.group() < kFirstPair)
      runs[former.envelope.run][former.report.group()].push_back(former.report);
  }
  const std::size_t newcomers = census().members;
  for (const auto& [run, reports] : runs) {
    std::size_t here = 0;
    bool majority = false;
    for (const auto& [group, of_group] : reports) {
      const auto [back, all] = count_back(of_group);
      here += back;
      majority = majority || back * 2 > all;
    }
    if (majority && here >= newcomers) return run;
  }
  return std::nullopt;
}

// A few members are no reason to end what newcomers have begun: their own run may have been ended
// on purpose.
void Master::settle_formers(Instant now) {
  if (formers_.empty()) return;
  const std::optional<std::uint64_t> back = run_that_is_back();
  const bool alone = groups_.empty();  // the newcomers have left
  if (!back && !alone && may_still_return(now)) return;
  if (back && !alone) end_run_of_newcomers();
  for (const auto& [id, former] : std::exchange(formers_, {})) {
    Connection* const connection = open(id);
    if (connection == nullptr) continue;
    connection->recovers = false;
    if (alone || former.envelope.run == back) {
      rejoin(id, *connection, {former.envelope, former.report.rejoin()}, now);
    } else {
      refuse(id, Code::evicted, kAnotherRun);
    }
  }
}

// Those that are no members of it yet try again, and may join the run that goes on.
void Master::end_run_of_newcomers() {
  log({true,
       {},
       0,
       "members of the run that this address served before are back: it goes on, and what "
       "newcomers have begun meanwhile ends"});
  for (auto& [id, connection] : connections_) {
    if (!connection.group) continue;
    const bool entered = member(id);
    connection.group.reset();
    if (entered) {
      refuse(id, Code::evicted,
             "the members of the run that its master had served before are back");
    } else {
      close_now(id);
    }
  }
  for (const auto& [group, recovery] : std::exchange(recoveries_, {})) {
    for (const Returned& one : recovery.reports)
      refuse(one.connection(), Code::evicted, kAnotherRun);
  }
  groups_.clear();
  replicas_.forget_all();
  admission_paused_ = false;
  own_run_ = next_run(own_run_);
  run_ = own_run_;
}

}  // namespace pccl::master
