// Members that return to a master which took over without them. One of the two sides may rest on a
// false report: the master gives way if the other side has more members.
#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "pccl/master/master.h"

namespace pccl::master {
namespace {

// How long such members wait for each other before they are refused. Below the time after which a
// member goes on to the next master.
constexpr Duration kAppealTime = std::chrono::seconds(1);
// How often this master gives way to them. Peers that never were members cost the run a takeover
// each time.
constexpr Rate kGivesWay{4, 0.1};

}  // namespace

// Whether the group that this master serves does not come from an epoch with this member, as far as
// the group knows.
bool Master::foreign(std::uint32_t group, const Seat& seat) const {
  return !quorums_.at(group).accepts(seat) && !seats_of(groups_.at(group)->record()).contains(seat);
}

void Master::appeal(ConnectionId id, Connection& connection, const wire::Rejoin& rejoin,
                    Instant now) {
  Returned returned(id, rejoin);
  Recovery& appeals = appeals_[rejoin.group];
  for (const Returned& other : appeals.reports)
    if (returned.share(other)) break;
  if (!room_for(returned)) {
    log_rarely("too many members return at the same time", now);
    return close_now(id);
  }
  connection.recovers = true;
  add_report(appeals, std::move(returned));
  hear_appeals(rejoin.group, now);
}

void Master::hear_appeals(std::uint32_t group, Instant now) {
  const auto it = appeals_.find(group);
  if (it == appeals_.end()) return;
  const auto quorum = quorums_.find(group);
  const bool served = quorum != quorums_.end();
  bool gives_way = false;
  if (served) {
    const std::size_t here = voters(group, quorum->second).size();
    std::set<Seat> seats;
    for (const Returned& one : it->second.reports) seats.insert(one.seat());
    gives_way = std::ranges::any_of(claims(it->second), [&](const Claim& claim) {
      const auto back = static_cast<std::size_t>(std::ranges::count_if(
          *claim.members, [&](const Seat& seat) { return seats.contains(seat); }));
      return back >= majority_of(claim.members->size()) && back > here;
    });
    gives_way = gives_way && gives_way_.take(kGivesWay, now);
  }
  const std::vector<Returned> reports = std::move(it->second.reports);
  appeals_.erase(it);
  const std::uint64_t run = run_;
  if (gives_way) step_down("more members have come from another epoch than this master has");
  for (const Returned& report : reports) {
    const ConnectionId id = report.connection();
    Connection* const connection = open(id);
    if (connection == nullptr) continue;
    if (served && !gives_way && now - connection->since < kAppealTime) {
      appeals_[group].reports.push_back(report);
      continue;
    }
    connection->recovers = false;
    if (gives_way) {
      rejoin_one(id, *connection, {{run, connection->term, 0}, report.rejoin()}, now);
    } else if (served && connection->term <= quorum->second.term()) {
      return_to(id, *connection, report.rejoin(), nullptr, now);
    } else {
      close_now(id);
    }
  }
}

}  // namespace pccl::master
