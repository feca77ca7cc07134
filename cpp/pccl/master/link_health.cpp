#include "pccl/master/link_health.h"

namespace pccl::master {

std::set<Pair> relayed_pairs(const wire::EpochRecord& record) {
  std::set<Pair> pairs;
  for (const auto& [a, b] : record.relayed)
    pairs.insert(pair_of(record.members[a].id, record.members[b].id));
  return pairs;
}

std::string link_advice(bool relays) {
  std::string text =
      "open a port of one of the two peers (PCCL_PORT), and if it is reachable at another address, "
      "advertise that address (PCCL_ADVERTISE)";
  if (!relays) text += "; or let the master relay (PCCL_RELAY)";
  return text;
}

// -- reports

bool LinkHealth::report(const PeerId& reporter, const wire::LinkReport& report, bool late,
                        Instant now) {
  Trouble& known = trouble(reporter, report.peer);
  const bool first = known.reason.empty();
  if (late && !first) return false;
  if (known.late) known = {};
  const bool fresh = known.reason.empty();
  known.late = late;
  if (fresh) known.since = now;
  known.broke = known.broke || report.state == wire::LinkState::broken;
  // `unreachable` and `silent` do not revert to `broken`; they end when the link is mended.
  if (!fresh && report.state == wire::LinkState::broken) return true;
  if (known.state == wire::LinkState::broken && report.state != wire::LinkState::broken)
    known.since = now;
  known.state = report.state;
  known.reason = report.reason.empty() ? "no reason given" : report.reason;
  return true;
}

void LinkHealth::mended(const PeerId& reporter, const PeerId& about, Instant now) {
  const auto it = pairs_.find(pair_of(reporter, about));
  if (it == pairs_.end()) return;
  Trouble& known = reporter < about ? it->second.of_first : it->second.of_second;
  if (known.reason.empty() || known.late) return;
  if (!known.broke) {
    known = {};
  } else if (known.state != wire::LinkState::broken) {
    known.state = wire::LinkState::broken;
    known.since = now;
  }
}

bool LinkHealth::troubled() const {
  return std::ranges::any_of(pairs_, [](const auto& item) {
    return !item.second.of_first.reason.empty() || !item.second.of_second.reason.empty();
  });
}

const std::string* LinkHealth::reason_about(const PeerId& about,
                                            const std::set<Pair>& except) const {
  const std::string* reason = nullptr;
  each_trouble([&](const Trouble& trouble, const PeerId& reporter, const PeerId& whom) {
    if (reason == nullptr && whom == about && !except.contains(pair_of(reporter, whom)))
      reason = &trouble.reason;
  });
  return reason;
}

LinkFindings LinkHealth::findings(const std::function<bool(const PeerId&)>& silent,
                                  const Options& options, Instant now) const {
  LinkFindings found;
  each_trouble([&](const Trouble& trouble, const PeerId& reporter, const PeerId& about) {
    if (trouble.late) return;
    // If the master does not hear from a member, the cause is the member and not the link.
    if (silent(reporter) || silent(about)) return;
    const Duration age = now - trouble.since;
    if (trouble.state == wire::LinkState::broken) {
      found.reset = found.reset || age >= kBrokenLinkGrace;
      return;
    }
    found.bad.push_back({reporter, about});
    // The other end may notice a silence up to two intervals later. Then its dial mends the link.
    const int intervals = trouble.state == wire::LinkState::silent ? 2 : 1;
    found.ripe = found.ripe || age >= intervals * options.heartbeat_interval;
    if (age >= options.heartbeat_timeout) found.overdue.push_back(found.bad.back());
  });
  return found;
}

std::vector<BadLink> LinkHealth::worn(const Rate& breaks, Instant now) {
  std::vector<BadLink> worn;
  for (auto& [pair, health] : pairs_) {
    const auto broke = [](const Trouble& trouble) {
      return !trouble.reason.empty() && !trouble.late && trouble.state == wire::LinkState::broken;
    };
    if (!broke(health.of_first) && !broke(health.of_second)) continue;
    if (!health.breaks.take(breaks, now)) worn.push_back({pair.first, pair.second});
  }
  return worn;
}

std::map<std::pair<PeerId, PeerId>, LinkHealth::Finding> LinkHealth::all(
    const std::set<Pair>& relayed, std::size_t most) const {
  std::map<std::pair<PeerId, PeerId>, Finding> found;
  each_trouble([&](const Trouble& trouble, const PeerId& reporter, const PeerId& about) {
    if (trouble.late || found.size() >= most) return;
    const wire::LinkCondition condition =
        trouble.state == wire::LinkState::unreachable ? wire::LinkCondition::unreachable
        : trouble.state == wire::LinkState::silent    ? wire::LinkCondition::silent
                                                      : wire::LinkCondition::broken;
    found[{reporter, about}] = {condition, trouble.reason};
  });
  const auto both_ways = [&](const Pair& pair, wire::LinkCondition condition) {
    if (found.size() >= most) return;
    found.try_emplace({pair.first, pair.second}, Finding{condition, {}});
    found.try_emplace({pair.second, pair.first}, Finding{condition, {}});
  };
  for (const Pair& pair : relayed) both_ways(pair, wire::LinkCondition::relayed);
  for (const Pair& pair : unusable()) both_ways(pair, wire::LinkCondition::avoided);
  return found;
}

std::string LinkHealth::example(const Peers& peers) const {
  std::string text;
  each_trouble([&](const Trouble& trouble, const PeerId& reporter, const PeerId& about) {
    if (!text.empty() || trouble.late) return;
    text = " (" + peers.shown(reporter) + " - " + peers.shown(about) + ": " + trouble.reason + ")";
  });
  return text;
}

// -- forgetting

void LinkHealth::begin_epoch() {
  for (auto& [pair, health] : pairs_) {
    health.of_first.late = health.of_second.late = true;
    health.unavoidable = false;
  }
}

void LinkHealth::drop_late(Instant now) {
  for (auto& [pair, health] : pairs_) {
    for (Trouble* trouble : {&health.of_first, &health.of_second})
      if (trouble->late && now - trouble->since >= kBrokenLinkGrace) *trouble = {};
  }
}

void LinkHealth::clear_troubles() {
  for (auto& [pair, health] : pairs_) health.of_first = health.of_second = {};
}

std::vector<Pair> LinkHealth::drop_member(const PeerId& id) {
  std::vector<Pair> relayed;
  for (auto it = pairs_.begin(); it != pairs_.end();) {
    const auto& [pair, health] = *it;
    if (pair.first != id && pair.second != id) {
      ++it;
      continue;
    }
    if (health.relay_wanted) relayed.push_back(pair);
    it = pairs_.erase(it);
  }
  return relayed;
}

// -- planning

void LinkHealth::use_all() {
  for (auto& [pair, health] : pairs_) health.unusable = health.unrelayable = false;
}

std::set<Pair> LinkHealth::pairs_with(bool Health::*flag) const {
  std::set<Pair> found;
  for (const auto& [pair, health] : pairs_)
    if (health.*flag) found.insert(pair);
  return found;
}

void LinkHealth::set_unavoidable(const std::set<Pair>& pairs) {
  for (auto& [pair, health] : pairs_) health.unavoidable = false;
  for (const Pair& pair : pairs) pairs_[pair].unavoidable = true;
}

std::vector<Pair> LinkHealth::end_relays(const std::set<Pair>& relayed) {
  std::vector<Pair> ended;
  for (auto& [pair, health] : pairs_) {
    if (!health.relay_wanted || relayed.contains(pair)) continue;
    health.relay_wanted = false;
    ended.push_back(pair);
  }
  return ended;
}

}  // namespace pccl::master
