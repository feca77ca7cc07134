#include "pccl/master/restart.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "pccl/master/reports.h"

namespace pccl::master {
namespace {

// How long a restarted master waits for more members once a majority has returned.
constexpr Duration kRecoveryGrace = std::chrono::seconds(1);

constexpr const char* kAnotherRun = "this master serves another run";

}  // namespace

void Restart::on_rejoin(ConnectionId id, ControlPeer& connection, const wire::Frame& frame,
                        Instant now) {
  const auto& rejoin = std::get<wire::Rejoin>(frame.message);
  const auto refuse = [&](const std::string& why) { connections_.refuse(id, Code::evicted, why); };
  if (const Status sound = check(rejoin, options_); !sound) return refuse(sound.error().reason);
  const bool same_run = frame.envelope.run == run_.id;
  const bool known = served_.find(rejoin.group) != nullptr;
  connection.term = frame.envelope.term;
  if (same_run && frame.envelope.term == run_.term && known)
    return returning_.return_to(id, connection, rejoin, nullptr, now);
  // A member of another master. It may return here if this master has no run of its own; this
  // master then continues that run with a higher term.
  if (!same_run && (!served_.all().empty() || !returning_.formers.empty())) {
    if (!may_still_return(now)) return refuse(kAnotherRun);
    return keep_former(id, connection, Returned(id, rejoin), frame.envelope, now);
  }
  if (frame.envelope.term > (same_run ? run_.term + kMaxTermsAhead : kMaxTerm)) {
    return refuse("peer " + name_of(rejoin) + " reports a master of term " +
                  std::to_string(frame.envelope.term) + ", and this one has term " +
                  std::to_string(run_.term));
  }
  if (known) return returning_.return_to(id, connection, rejoin, nullptr, now);
  if (const std::string why_not = replicas_.objection(rejoin); !why_not.empty())
    return refuse(why_not);
  Returned returned(id, rejoin);
  if (!returning_.admit(returned)) return;
  if (!same_run) {
    if (!returning_.recoveries.empty()) return refuse(kAnotherRun);
    run_.id = frame.envelope.run;
  }
  run_.term = std::max(run_.term, frame.envelope.term + 1);
  replicas_.recover(rejoin.record.ranks_per_replica, now);
  Recovery& recovery = returning_.recoveries[rejoin.group];
  if (recovery.reports.empty()) recovery.since = now;
  const auto asked = recovery.asked.find(returned.seat());
  if (asked != recovery.asked.end() && now - asked->second >= kHandshakeTimeout)
    return refuse("its log did not arrive within the handshake timeout");
  returning_.add(recovery, returned);
  connection.recovers = true;
  for (const wire::Member& member : rejoin.record.members)
    run_.joins = std::max(run_.joins, member.joined);
  rebuild_if_ready(rejoin.group, now);
}

void Restart::rebuild_if_ready(std::uint32_t group, Instant now) {
  const auto it = returning_.recoveries.find(group);
  if (it == returning_.recoveries.end()) return;
  Recovery& recovery = it->second;
  const auto [back, all] = count_back(recovery.reports);
  const std::string share = std::to_string(back) + " of " + std::to_string(all) + " members";
  if (back * 2 <= all && now - recovery.since >= options_.reconnect_timeout) {
    // Newcomers must not wait for the other members for ever.
    const std::vector<Returned> reports = std::move(it->second.reports);
    returning_.recoveries.erase(it);
    outbox_.log(
        {true, group, reports.front().at().first, "only " + share + " returned; that run is over"});
    for (const Returned& one : reports) {
      connections_.refuse(one.connection(), Code::evicted,
                          "too few members of the run returned to the restarted master");
    }
    return returning_.forget_run();
  }
  if (back * 2 <= all || (back < all && now - recovery.since < kRecoveryGrace)) return;
  const Returned& best = newest(recovery.reports);
  const auto entries = returning_.whole_log(best.connection(), best.rejoin(), recovery, now);
  if (!entries) return;
  const std::vector<Returned> reports = std::move(it->second.reports);
  returning_.recoveries.erase(it);
  for (const Returned& one : reports) {
    ControlPeer& connection = connections_.at(one.connection());
    connection.group = group;
    connection.recovers = false;
    connection.asked.reset();
  }
  outbox_.log({false, group, newest(reports).at().first, "rebuilt from the reports of " + share});
  // Not in `served_` during rebuild(), which asks for the census.
  auto rebuilt = Group::rebuild(group, options_, around_, reports, *entries, now);
  rebuilt->rebuilt_in(run_.term);
  served_.put(group, std::move(rebuilt));
}

// -- newcomers that were faster than the members of the run

// The newcomer must not found another run here, but try again once the members have returned. If
// none comes, that run had not begun, or is over.
bool Restart::must_wait(std::uint64_t run, std::uint32_t group, Instant now) const {
  if (run != 0 && run != run_.id && now - outbox_.began() < quiet_time(options_)) return true;
  if (returning_.recoveries.contains(group)) return true;
  return replicas_.recovering() && served_.find(group) == nullptr;
}

// Whether members of an earlier run may still come back to this restarted master, which has begun
// another one.
bool Restart::may_still_return(Instant now) const {
  return run_.id == run_.own && now - outbox_.began() < options_.reconnect_timeout;
}

void Restart::keep_former(ConnectionId id, ControlPeer& connection, Returned report,
                          const wire::Envelope& envelope, Instant now) {
  if (!returning_.admit(report)) return;
  std::erase_if(returning_.formers, [&](const auto& item) {  // it has returned before: see add()
    if (item.second.report.seat() != report.seat()) return false;
    connections_.close(item.first);
    return true;
  });
  connection.recovers = true;
  returning_.formers.emplace(id, Former{std::move(report), envelope});
  settle_formers(now);
}

// The run of which a majority of a group is back, and which has at least as many members here as
// the one that newcomers have begun. The run does not depend on pairs.
std::optional<std::uint64_t> Restart::run_that_is_back() const {
  std::map<std::uint64_t, std::map<std::uint32_t, std::vector<Returned>>> runs;
  for (const auto& [id, former] : returning_.formers) {
    if (former.report.group() < kFirstPair)
      runs[former.envelope.run][former.report.group()].push_back(former.report);
  }
  const std::size_t newcomers = served_.census().members;
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
void Restart::settle_formers(Instant now) {
  if (returning_.formers.empty()) return;
  const std::optional<std::uint64_t> back = run_that_is_back();
  const bool alone = served_.all().empty();  // the newcomers have left
  if (!back && !alone && may_still_return(now)) return;
  if (back && !alone) end_run_of_newcomers();
  for (const auto& [id, former] : std::exchange(returning_.formers, {})) {
    ControlPeer* const connection = connections_.open(id);
    if (connection == nullptr) continue;
    connection->recovers = false;
    if (alone || former.envelope.run == back) {
      on_rejoin(id, *connection, {former.envelope, former.report.rejoin()}, now);
    } else {
      connections_.refuse(id, Code::evicted, kAnotherRun);
    }
  }
}

// Those that are no members of it yet try again, and may join the run that goes on.
void Restart::end_run_of_newcomers() {
  outbox_.log({true,
               {},
               0,
               "members of the run that this address served before are back: it goes on, and what "
               "newcomers have begun meanwhile ends"});
  connections_.part_from({}, [&](ConnectionId id) {
    if (!served_.member(id)) return;
    connections_.refuse(id, Code::evicted,
                        "the members of the run that its master had served before are back");
  });
  for (const auto& [group, recovery] : std::exchange(returning_.recoveries, {})) {
    for (const Returned& one : recovery.reports)
      connections_.refuse(one.connection(), Code::evicted, kAnotherRun);
  }
  served_.clear();
  replicas_.forget_all();
  run_.admission_paused = false;
  run_.own = next_run(run_.own);
  run_.id = run_.own;
}

}  // namespace pccl::master
