#include "pccl/master/link_rules.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "pccl/base/text.h"
#include "pccl/master/judgements.h"

namespace pccl::master {

bool LinkRules::report(const PeerId& id, const wire::LinkReport& report, Instant now) {
  const bool relayed = report.state == wire::LinkState::relayed;
  if (relayed || report.state == wire::LinkState::mended) {
    // A link of a relayed pair was established directly, perhaps before this epoch or under another
    // master.
    const Pair pair = pair_of(id, report.peer);
    if (!relayed && relayed_pairs(record_).contains(pair) &&
        topology::edges(record_.plan).contains(*planning_.ranks_of({pair}).begin()))
      links_.use(pair);
    links_.mended(id, report.peer, now);
    return false;
  }
  const bool late = report.epoch != record_.epoch;
  return links_.report(id, report, late, now);
}

// Plans without these links. False: no plan avoids them.
bool LinkRules::plan_around(const std::vector<BadLink>& bad) {
  std::set<Pair> pairs;
  for (const BadLink& link : bad) pairs.insert(pair_of(link.reporter, link.about));
  if (links_.unavoidable(pairs)) return false;  // tried before
  const std::set<Pair> relayed = relayed_pairs(record_);
  std::vector<Pair> avoided;
  std::vector<Pair> not_relayed;
  for (const Pair& pair : pairs) {
    if (links_.avoid(pair)) avoided.push_back(pair);
    // The relay of this link has failed too.
    if (relayed.contains(pair) && links_.avoid_relaying(pair)) not_relayed.push_back(pair);
  }
  if (decisions_.plan_epoch()) {
    context_.note("planned around " + plural(bad.size(), "bad link report"));
    return true;
  }
  for (const Pair& pair : avoided) links_.use(pair);
  for (const Pair& pair : not_relayed) links_.relay(pair);
  links_.set_unavoidable(pairs);
  return false;
}

// The members to remove when no plan avoids these links: all in one step, since finding the next
// one later would take another timeout.
std::vector<Departed> LinkRules::evict_for_links(const std::vector<BadLink>& bad,
                                                 std::vector<BadLink> overdue) {
  links_.clear_troubles();
  const std::set<Pair> relayed = relayed_pairs(record_);
  for (const BadLink& link : overdue) {
    const Pair pair = pair_of(link.reporter, link.about);
    if (relayed.contains(pair)) links_.avoid_relaying(pair);
  }
  std::vector<Departed> gone;
  std::vector<PeerId> left = peers_.ids();
  for (std::optional<PeerId> victim = judge_links(left, bad); victim;
       victim = judge_links(left, overdue)) {
    std::set<PeerId> others;
    for (const BadLink& link : bad) {
      if (link.about == *victim) others.insert(link.reporter);
      if (link.reporter == *victim) others.insert(link.about);
    }
    std::string with;
    for (const PeerId& other : others) with += " " + peers_.shown(other);
    gone.push_back({*victim, Code::unreachable,
                    "its links to these peers do not work:" + with +
                        "; no plan avoids these links: " + link_advice(context_.options.relays)});
    std::erase(left, *victim);
    std::erase_if(overdue, [&](const BadLink& link) {
      return link.about == *victim || link.reporter == *victim;
    });
    std::set<topology::Edge> edges;
    std::set<topology::Edge> never;
    const auto add = [&](const PeerId& a, const PeerId& b, std::set<topology::Edge>& to) {
      const auto first = std::ranges::find(left, a) - left.begin();
      const auto second = std::ranges::find(left, b) - left.begin();
      const auto n = static_cast<std::ptrdiff_t>(left.size());
      if (first < n && second < n)
        to.insert(
            std::minmax(static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(second)));
    };
    for (const BadLink& link : overdue) add(link.reporter, link.about, edges);
    for (const auto& [a, b] : links_.unusable()) add(a, b, edges);
    for (const auto& [a, b] : links_.unrelayable()) add(a, b, never);
    if (planning_.exists(left.size(), edges, never)) break;
  }
  for (const BadLink& link : overdue) links_.avoid(pair_of(link.reporter, link.about));
  return gone;
}

std::vector<Departed> LinkRules::check(Instant now) {
  links_.drop_late(now);
  const std::set<Pair> relayed = relayed_pairs(record_);
  std::vector<Departed> gone;
  for (const Peer& peer : peers_.members) {
    if (peer.connection != 0) continue;
    // A broken control connection and a report of a bad link indicate a killed process. For a
    // member that has not returned yet, ignore relayed links: they ended with the previous master.
    const std::string* reason =
        links_.reason_about(peer.member.id, peer.returned ? std::set<Pair>{} : relayed);
    if (reason != nullptr)
      gone.push_back({peer.member.id, Code::evicted, "connection lost (" + *reason + ")"});
  }
  if (!gone.empty()) return gone;
  const auto is_silent = [&](const PeerId& id) { return peers_.silent(id, context_.options, now); };
  LinkFindings found = links_.findings(is_silent, context_.options, now);
  if (found.ripe) {
    const bool planned = plan_around(found.bad);
    found.reset = found.reset || planned;
    // A member must be evicted, but not before the heartbeat timeout: by then the master knows
    // whether one of the two ends has died.
    if (!planned && !found.overdue.empty()) return evict_for_links(found.bad, found.overdue);
  }
  if (!found.reset) return {};
  const std::vector<BadLink> worn = links_.worn(context_.options.limits.breaks, now);
  if (!worn.empty() && !plan_around(worn)) {
    // A member that breaks its links to several others is in most pairs. No member is evicted for a
    // single pair.
    const std::optional<PeerId> victim = judge_links(peers_.ids(), worn);
    const auto with_it = std::ranges::count_if(worn, [&](const BadLink& link) {
      return victim && (link.about == *victim || link.reporter == *victim);
    });
    if (with_it > 1) {
      links_.clear_troubles();
      return {{*victim, Code::unreachable, "its links break again and again"}};
    }
  }
  decisions_.reset_links();
  return {};
}

}  // namespace pccl::master
