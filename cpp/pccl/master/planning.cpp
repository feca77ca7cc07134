#include "pccl/master/planning.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "pccl/topology/predict.h"

namespace pccl::master {

// -- plans

std::set<topology::Edge> Planning::ranks_of(const std::set<Pair>& pairs) const {
  std::set<topology::Edge> edges;
  const std::size_t world = peers_.members.size();
  for (const auto& [a, b] : pairs) {
    const auto first = static_cast<std::uint32_t>(peers_.rank_of(a));
    const auto second = static_cast<std::uint32_t>(peers_.rank_of(b));
    if (first < world && second < world) edges.insert(std::minmax(first, second));
  }
  return edges;
}

std::optional<Draft> Planning::draft(const wire::EpochRecord& record) {
  std::vector<PeerId> before;
  for (const wire::Member& known : record.members) before.push_back(known.id);
  const std::size_t most = wire::kMaxRelayed;
  topology::Situation present{static_cast<std::uint32_t>(peers_.members.size()),
                              options_.segment_bytes,
                              ranks_of(links_.unusable()),
                              hosts(),
                              topology::carried(rates_, before, peers_.ids()),
                              options_.thresholds};
  const std::vector<PeerId> members = peers_.ids();
  for (std::size_t rank = 0; rank < members.size(); ++rank)
    topology::introduce(present.rates, members, rank, peers_.members[rank].row);
  auto choice = topology::choose(present);
  std::set<topology::Edge> relayed;
  const std::set<topology::Edge> never = ranks_of(links_.unrelayable());
  const std::set<topology::Edge> unusable = present.unusable;
  if (!choice && options_.relays) {
    relayed = topology::detours(present.world, unusable, never, most, present.hosts);
    for (const topology::Edge& pair : relayed) present.unusable.erase(pair);
    choice = topology::choose(present);
  }
  if (!choice) return std::nullopt;
  Draft draft{std::move(*choice), std::move(present.rates), {}};
  if (!options_.relays) return draft;
  // Transfers of shared state may need links that the plan does not use.
  for (const topology::Edge& pair : unusable) {
    if (relayed.size() >= most) break;
    if (!never.contains(pair)) relayed.insert(pair);
  }
  for (const auto& [a, b] : relayed) draft.relayed.push_back({a, b});
  return draft;
}

std::string Planning::take(Draft draft, wire::EpochRecord& record) {
  record.plan = std::move(draft.choice.plan);
  record.rates = rates_ = std::move(draft.rates);
  record.relayed = std::move(draft.relayed);
  rates_moved_ = better_ = look_now_ = false;
  hosts_differ_since_.reset();
  return why_ = std::move(draft.choice.why);
}

bool Planning::exists(std::size_t world, const std::set<topology::Edge>& unusable,
                      const std::set<topology::Edge>& unrelayable) const {
  return topology::plannable(static_cast<std::uint32_t>(world), unusable, unrelayable,
                             options_.relays ? wire::kMaxRelayed : 0);
}

bool Planning::fits(const Peer& newcomer) const {
  if (newcomer.unreachable.empty()) return true;
  std::set<topology::Edge> edges = ranks_of(links_.unusable());
  const auto own = static_cast<std::uint32_t>(peers_.members.size());
  for (const PeerId& id : newcomer.unreachable) {
    const auto rank = static_cast<std::uint32_t>(peers_.rank_of(id));
    if (rank < own) edges.insert({rank, own});
  }
  return exists(peers_.members.size() + 1, edges, ranks_of(links_.unrelayable()));
}

// -- memory sharing

const std::vector<std::uint32_t>& Planning::hosts() {
  if (hosts_) return *hosts_;
  const std::vector<Peer>& members = peers_.members;
  std::set<topology::Edge> shared;
  for (std::uint32_t b = 0; b < members.size(); ++b) {
    for (std::uint32_t a = 0; a < b; ++a) {
      if (members[a].shares_with.contains(members[b].member.id) &&
          members[b].shares_with.contains(members[a].member.id)) {
        shared.insert({a, b});
      }
    }
  }
  return hosts_.emplace(topology::hosts(static_cast<std::uint32_t>(members.size()), shared));
}

// Peers detect shared memory only a moment after the group has started.
bool Planning::hosts_due(const wire::EpochRecord& record, Instant now) {
  if (peers_.members.empty() || hosts() == record.plan.hosts) {
    hosts_differ_since_.reset();
    return false;
  }
  if (!hosts_differ_since_) hosts_differ_since_ = now;
  return peers_.sharing_settled() || now - *hosts_differ_since_ >= options_.heartbeat_interval;
}

// -- rates of links

void Planning::measured(std::size_t rank, const wire::Measurements& row,
                        const wire::RateTable& planned) {
  const std::set<topology::Edge> unusable = ranks_of(links_.unusable());
  const bool knew = topology::knows_delays(rates_, hosts(), unusable);
  topology::merge(rates_, peers_.ids(), rank, row);
  rates_moved_ = rates_ != planned;
  // All delays are known now. They are no chance, as a rate may be: one look is enough.
  if (!knew && topology::knows_delays(rates_, hosts(), unusable)) look_now_ = true;
}

std::optional<Draft> Planning::better(const wire::EpochRecord& record, Instant now) {
  looked_ = now;
  const bool at_once = std::exchange(look_now_, false);
  auto found = draft(record);
  const bool better =
      found && topology::worth_changing(record.plan, found->choice.plan, found->rates);
  rates_moved_ = better;
  const bool before = std::exchange(better_, better);
  if (!better || !(before || at_once)) return std::nullopt;
  better_ = false;
  return found;
}

bool Planning::measuring_helps(std::uint64_t admission) {
  const std::size_t world = peers_.members.size();
  if (!slow_ || asked_in_ == admission || world > topology::kMaxTable) return false;
  const std::vector<std::uint32_t>& numbers = hosts();
  const bool one_host = std::ranges::adjacent_find(numbers, std::not_equal_to<>()) == numbers.end();
  if (one_host) return false;
  return rates_.hosts.size() != world ||
         std::ranges::any_of(
             rates_.hosts, [](const wire::HostRate& host) { return host.up_kilobytes_per_s == 0; });
}

}  // namespace pccl::master
