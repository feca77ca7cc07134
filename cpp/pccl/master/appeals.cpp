// Members that return to a master which took over without them. One of the two sides may rest on a
// false report: the master gives way if the other side has more members.
#include <algorithm>
#include <utility>

#include "pccl/master/takeover.h"

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
bool Takeover::foreign(std::uint32_t group, const Seat& seat) const {
  return !served_.quorum(group)->accepts(seat) &&
         !seats_of(served_.find(group)->record()).contains(seat);
}

void Takeover::appeal(ConnectionId id, ControlPeer& connection, const wire::Rejoin& rejoin,
                      Instant now) {
  Returned returned(id, rejoin);
  if (!returning_.admit(returned)) return;
  connection.recovers = true;
  returning_.add(returning_.appeals[rejoin.group], returned);
  hear_appeals(rejoin.group, now);
}

void Takeover::hear_appeals(Instant now) {
  std::vector<std::uint32_t> groups;
  for (const auto& [group, appeals] : returning_.appeals) groups.push_back(group);
  for (const std::uint32_t group : groups) hear_appeals(group, now);
}

// Whether a majority of another epoch is here, and more members than this master has in the group.
bool Takeover::outnumbered(std::uint32_t group, const Recovery& appeals) const {
  const std::size_t here = served_.voters(group, *served_.quorum(group)).size();
  std::set<Seat> seats;
  for (const Returned& one : appeals.reports) seats.insert(one.seat());
  return std::ranges::any_of(claims(reporters(appeals)), [&](const EpochClaim& claim) {
    const std::size_t back = count_members(claim, seats);
    return back >= majority_of(claim.members->size()) && back > here;
  });
}

void Takeover::hear_appeals(std::uint32_t group, Instant now) {
  const auto node = returning_.appeals.extract(group);
  if (node.empty()) return;
  const Recovery& appeals = node.mapped();
  const Quorum* const quorum = served_.quorum(group);
  const bool served = quorum != nullptr;
  const bool gives_way = served && outnumbered(group, appeals) && gives_way_.take(kGivesWay, now);
  const std::uint64_t run = run_.id;
  if (gives_way) step_down("more members have come from another epoch than this master has");
  for (const Returned& report : appeals.reports) {
    const ConnectionId id = report.connection();
    ControlPeer* const connection = connections_.open(id);
    if (connection == nullptr) continue;
    if (served && !gives_way && now - connection->since < kAppealTime) {
      returning_.appeals[group].reports.push_back(report);
      continue;
    }
    connection->recovers = false;
    if (gives_way) {
      on_rejoin(id, *connection, {{run, connection->term, 0}, report.rejoin()}, now);
    } else if (served && connection->term <= quorum->term()) {
      returning_.return_to(id, *connection, report.rejoin(), nullptr, now);
    } else {
      connections_.close(id);
    }
  }
}

}  // namespace pccl::master
