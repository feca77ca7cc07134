#include "pccl/topology/plan.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

namespace pccl::topology {
namespace {

Edge edge(std::uint32_t a, std::uint32_t b) { return a < b ? Edge{a, b} : Edge{b, a}; }

// What a ring must not use: none of `never`, and at most `spare` of `unusable`.
struct RingLimits {
  const std::set<Edge>& unusable;
  const std::set<Edge>& never;
  std::size_t spare = 0;
};

// Extends `order` to a ring over all ranks within `limits`, trying `candidates` in their order.
// `budget` bounds the search: with few unusable links a ring is found at once, with very many the
// answer "none" may be wrong for large worlds.
bool extend_ring(std::vector<std::uint32_t>& order, std::vector<bool>& used,
                 std::span<const std::uint32_t> candidates, const RingLimits& limits, int& budget) {
  if (--budget < 0) return false;
  const auto cost = [&](std::uint32_t to) -> std::size_t {
    const Edge step = edge(order.back(), to);
    return limits.never.contains(step) ? limits.spare + 1 : limits.unusable.contains(step) ? 1 : 0;
  };
  if (order.size() == candidates.size()) return cost(order.front()) <= limits.spare;
  for (const std::uint32_t next : candidates) {
    if (used[next] || cost(next) > limits.spare) continue;
    const RingLimits left{limits.unusable, limits.never, limits.spare - cost(next)};
    used[next] = true;
    order.push_back(next);
    if (extend_ring(order, used, candidates, left, budget)) return true;
    order.pop_back();
    used[next] = false;
  }
  return false;
}

std::set<Edge> both(const std::set<Edge>& one, const std::set<Edge>& other) {
  std::set<Edge> common;
  std::set_intersection(one.begin(), one.end(), other.begin(), other.end(),
                        std::inserter(common, common.end()));
  return common;
}

std::set<Edge> ring_edges(const std::vector<std::uint32_t>& order) {
  std::set<Edge> used;
  for (std::size_t i = 0; i < order.size() && order.size() > 1; ++i)
    used.insert(edge(order[i], order[(i + 1) % order.size()]));
  return used;
}

// No ring takes fewer of `unusable`: every rank has two neighbours, and one for want of others
// costs both ends.
std::size_t least_spare(std::size_t ranks, const std::set<Edge>& unusable) {
  if (ranks < 3) return 0;
  std::vector<std::size_t> usable(ranks, ranks - 1);
  for (const auto& [a, b] : unusable) {
    --usable[a];
    --usable[b];
  }
  std::size_t ends = 0;
  for (const std::size_t count : usable) ends += count < 2 ? 2 - count : 0;
  return (ends + 1) / 2;
}

// The ring that takes the fewest of `unusable`; empty when there is none, or none was found.
std::vector<std::uint32_t> cheapest_ring(const std::vector<std::uint32_t>& candidates,
                                         const std::set<Edge>& unusable,
                                         const std::set<Edge>& never, std::size_t most) {
  const std::size_t first = least_spare(candidates.size(), unusable);
  int budget = 100'000;  // for all of them: this is judged often, beside everything else
  for (std::size_t spare = first; spare <= std::min(most, candidates.size()); ++spare) {
    std::vector<std::uint32_t> order{candidates.front()};
    std::vector<bool> used(candidates.size(), false);
    used[order.front()] = true;
    if (extend_ring(order, used, candidates, {unusable, never, spare}, budget)) return order;
  }
  return {};
}

}  // namespace

std::optional<wire::Plan> make_plan(std::uint32_t world, std::uint32_t segment_bytes,
                                    const std::set<Edge>& unusable,
                                    const std::vector<std::uint32_t>& hosts,
                                    const Thresholds& thresholds) {
  wire::Plan plan;
  plan.segment_bytes = segment_bytes;
  plan.hosts = hosts;
  std::vector<std::uint32_t> ranks(world);
  std::iota(ranks.begin(), ranks.end(), 0U);
  const HostRanks together = by_host(ranks, hosts);
  // Neighbours side by side: a ring leaves each host once.
  for (const auto& there : together)
    plan.order.insert(plan.order.end(), there.begin(), there.end());
  bool has_ring = true;
  if (!unusable.empty()) {
    const std::vector<std::uint32_t> candidates = plan.order;
    std::vector<std::uint32_t> order{0};
    std::vector<bool> used(world, false);
    used[0] = true;
    int budget = 100'000;
    has_ring = extend_ring(order, used, candidates, {unusable, {}, 0}, budget);
    if (has_ring) plan.order = std::move(order);
  }
  constexpr auto kAnySize = std::numeric_limits<std::uint64_t>::max();
  const std::vector<std::uint32_t> equal(world, 1);
  // Who can own: what they need is a link to every other rank.
  std::vector<std::uint32_t> owners = equal;
  for (const auto& [a, b] : unusable) owners[a] = owners[b] = 0;
  const auto first_owner = std::find(owners.begin(), owners.end(), 1U);
  const bool owned = first_owner != owners.end();
  if (!has_ring && !owned) return std::nullopt;
  std::vector<std::uint32_t> first(world, 0);
  if (owned) first[static_cast<std::size_t>(first_owner - owners.begin())] = 1;
  const auto choose = [&](wire::ScheduleKind direct, wire::ScheduleKind ring,
                          const std::vector<std::uint32_t>& shares, bool mesh) {
    plan.classes.clear();
    if (mesh) {
      plan.classes.push_back({thresholds.single_owner_bytes, direct, first});
      plan.classes.push_back({thresholds.direct_bytes, direct, shares});
    }
    if (has_ring) {
      plan.classes.push_back({kAnySize, ring, equal});
    } else {
      plan.classes.back().max_bytes = kAnySize;
    }
  };
  const auto avoids_unusable = [&] {
    const std::set<Edge> used = edges(plan);
    return std::none_of(unusable.begin(), unusable.end(),
                        [&](const Edge& bad) { return used.contains(bad); });
  };
  std::size_t largest = 0;
  for (const auto& there : together) largest = std::max(largest, there.size());
  if (has_ring && together.size() > 1 && largest > 1 && largest <= kMaxMesh) {
    if (!owned) first[0] = 1;
    choose(wire::ScheduleKind::host_direct, wire::ScheduleKind::host_ring, equal,
           together.size() <= kMaxMesh);
    if (avoids_unusable()) return plan;
  }
  choose(wire::ScheduleKind::direct, wire::ScheduleKind::ring, owners,
         owned && (world <= kMaxMesh || !has_ring));
  return plan;
}

std::set<Edge> detours(std::uint32_t world, const std::set<Edge>& unusable,
                       const std::set<Edge>& never, std::size_t most,
                       const std::vector<std::uint32_t>& hosts) {
  const auto fits = [&](const std::set<Edge>& taken) {
    return !taken.empty() && taken.size() <= most && both(taken, never).empty();
  };
  if (world < 2) return {};
  // As if all links worked: what is reduced once for each host, or in two hops, is worth some more.
  const std::optional<wire::Plan> free = make_plan(world, 64, {}, hosts);
  const std::set<Edge> all = both(edges(*free), unusable);
  const std::vector<std::uint32_t> order = cheapest_ring(free->order, unusable, never, most);
  const std::set<Edge> ring = both(ring_edges(order), unusable);
  const bool by_hosts = free->classes.back().kind == wire::ScheduleKind::host_ring;
  const bool no_dearer = by_hosts || both(ring_edges(free->order), unusable).size() <= ring.size();
  if (no_dearer && fits(all)) return all;
  if (fits(ring)) return ring;
  std::set<Edge> star;
  for (std::uint32_t owner = 0; owner < world; ++owner) {
    std::set<Edge> spokes;
    for (std::uint32_t other = 0; other < world; ++other)
      if (unusable.contains(edge(owner, other)) && other != owner)
        spokes.insert(edge(owner, other));
    if (fits(spokes) && (star.empty() || spokes.size() < star.size())) star = std::move(spokes);
  }
  return star;
}

bool plannable(std::uint32_t world, const std::set<Edge>& unusable, const std::set<Edge>& never,
               std::size_t most) {
  // Who could own everything: with as many detours as it lacks links.
  std::vector<std::size_t> lacks(world, 0);
  for (const auto& [a, b] : unusable)
    for (const std::uint32_t rank : {a, b}) lacks[rank] += never.contains({a, b}) ? most + 1 : 1;
  if (std::any_of(lacks.begin(), lacks.end(), [&](std::size_t links) { return links <= most; }))
    return true;
  return make_plan(world, 64, unusable).has_value() ||
         (most > 0 && !detours(world, unusable, never, most).empty());
}

HostRanks by_host(std::span<const std::uint32_t> order, std::span<const std::uint32_t> hosts) {
  HostRanks ranks;
  std::map<std::uint32_t, std::size_t> places;
  for (std::size_t i = 0; i < order.size(); ++i) {
    // Not known: every rank is a host of its own.
    const std::uint32_t host =
        hosts.size() == order.size() ? hosts[order[i]] : static_cast<std::uint32_t>(i);
    const std::size_t place = places.try_emplace(host, ranks.size()).first->second;
    if (place == ranks.size()) ranks.emplace_back();
    ranks[place].push_back(order[i]);
  }
  for (auto& there : ranks) std::sort(there.begin(), there.end());
  return ranks;
}

Delegates::Delegates(const HostRanks& hosts, std::uint32_t owner) : hosts_(hosts) {
  for (std::size_t host = 0; host < hosts.size(); ++host) {
    const auto found = std::find(hosts[host].begin(), hosts[host].end(), owner);
    if (found == hosts[host].end()) continue;
    home_ = host;
    place_ = static_cast<std::size_t>(found - hosts[host].begin());
  }
}

std::uint32_t Delegates::of(std::size_t host) const {
  const std::size_t there = hosts_[host].size();
  const std::size_t here = hosts_[home_].size();
  // Hosts of other sizes than this one take turns with its ranks.
  return hosts_[host][there == here ? place_ : (place_ * there / here + home_) % there];
}

Places places(const HostRanks& hosts, std::span<const std::uint32_t> regions) {
  Places found{hosts, {}, {}, {}};
  std::map<std::uint32_t, std::uint32_t> known;
  std::size_t ranks = 0;
  for (const auto& there : hosts) ranks += there.size();
  found.host_of.resize(ranks);
  for (std::uint32_t host = 0; host < hosts.size(); ++host) {
    for (const std::uint32_t rank : hosts[host]) found.host_of[rank] = host;
    const std::uint32_t region = regions.size() == ranks ? regions[hosts[host].front()] : host;
    const auto next = static_cast<std::uint32_t>(found.regions.size());
    const std::uint32_t place = known.try_emplace(region, next).first->second;
    if (place == next) found.regions.emplace_back();
    found.regions[place].push_back(host);
    found.region_of.push_back(place);
  }
  return found;
}

Places places(const wire::Plan& plan) {
  std::vector<std::uint32_t> ranks(plan.order.size());
  std::iota(ranks.begin(), ranks.end(), 0U);
  return places(by_host(ranks, plan.hosts), plan.regions);
}

Tree::Tree(const Places& places, std::uint32_t owner)
    : places_(places),
      owner_(owner),
      of_hosts_(places.hosts, owner),
      of_regions_(places.regions, static_cast<std::uint32_t>(of_hosts_.home())) {}

std::uint32_t Tree::above(std::uint32_t rank) const {
  const std::uint32_t host = places_.host_of[rank];
  const std::uint32_t of_host = of_hosts_.of(host);
  if (rank != of_host) return of_host;
  const std::uint32_t speaks = of_regions_.of(places_.region_of[host]);
  return speaks == host ? owner_ : of_hosts_.of(speaks);
}

bool Tree::leaves_region(std::uint32_t rank) const {
  const std::uint32_t host = places_.host_of[rank];
  const std::size_t region = places_.region_of[host];
  return region != of_regions_.home() && host == of_regions_.of(region) &&
         rank == of_hosts_.of(host);
}

const wire::SizeClass& size_class(const wire::Plan& plan, std::uint64_t bytes, bool widens,
                                  bool coded) {
  const wire::SizeClass* chosen = &plan.classes.back();
  for (const wire::SizeClass& candidate : plan.classes) {
    if (bytes <= candidate.max_bytes) {
      chosen = &candidate;
      break;
    }
  }
  const bool many_hops = (chosen->kind == wire::ScheduleKind::ring && (widens || coded)) ||
                         (chosen->kind == wire::ScheduleKind::host_ring && coded);
  if (many_hops) {
    // The largest direct class: its shares are the balanced ones.
    const auto direct =
        std::find_if(plan.classes.rbegin(), plan.classes.rend(), [&](const auto& c) {
          return c.kind == wire::ScheduleKind::direct ||
                 (coded && c.kind == wire::ScheduleKind::host_direct);
        });
    if (direct != plan.classes.rend()) chosen = &*direct;
  }
  return *chosen;
}

bool owned_by_all(const wire::SizeClass& size) {
  return size.kind == wire::ScheduleKind::ring ||
         std::none_of(size.shares.begin(), size.shares.end(),
                      [](std::uint32_t share) { return share == 0; });
}

const wire::SizeClass& all_owning(const wire::Plan& plan, const wire::SizeClass& size) {
  if (owned_by_all(size)) return size;
  const wire::SizeClass* around = &size;
  for (const wire::SizeClass& other : plan.classes) {
    if (!owned_by_all(other)) continue;
    if (other.kind == size.kind) return other;
    if (other.kind == wire::ScheduleKind::ring || other.kind == wire::ScheduleKind::host_ring)
      around = &other;
  }
  return *around;
}

bool valid(const wire::Plan& plan, std::size_t world) {
  if (plan.segment_bytes < 64 || plan.segment_bytes > (1U << 24)) return false;
  if (world == 0 || plan.order.size() != world || plan.classes.empty()) return false;
  if (!plan.hosts.empty() && plan.hosts.size() != world) return false;
  if (!plan.regions.empty() && plan.regions.size() != world) return false;
  std::vector<bool> seen(world, false);
  for (const std::uint32_t rank : plan.order) {
    if (rank >= world || seen[rank]) return false;
    seen[rank] = true;
  }
  for (std::size_t a = 0; a < plan.regions.size() && !plan.hosts.empty(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      if (plan.hosts[a] == plan.hosts[b] && plan.regions[a] != plan.regions[b]) return false;
    }
  }
  return std::all_of(plan.classes.begin(), plan.classes.end(), [&](const wire::SizeClass& size) {
    return size.shares.size() == world && std::any_of(size.shares.begin(), size.shares.end(),
                                                      [](std::uint32_t s) { return s > 0; });
  });
}

std::set<Edge> edges(const wire::Plan& plan) {
  std::set<Edge> used;
  const std::size_t world = plan.order.size();
  if (world < 2) return used;
  const HostRanks together = by_host(plan.order, plan.hosts);
  const Places regional = places(plan);
  for (const wire::SizeClass& size : plan.classes) {
    if (size.kind == wire::ScheduleKind::regional) {
      for (std::uint32_t owner = 0; owner < size.shares.size(); ++owner) {
        if (size.shares[owner] == 0) continue;
        const Tree tree(regional, owner);
        for (std::uint32_t rank = 0; rank < world; ++rank)
          if (rank != owner) used.insert(edge(rank, tree.above(rank)));
      }
      continue;
    }
    if (size.kind == wire::ScheduleKind::host_ring ||
        size.kind == wire::ScheduleKind::host_direct) {
      for (std::uint32_t owner = 0; owner < size.shares.size(); ++owner) {
        if (size.shares[owner] == 0) continue;
        const Delegates delegates(together, owner);
        for (std::size_t host = 0; host < together.size(); ++host) {
          const std::uint32_t here = delegates.of(host);
          for (const std::uint32_t rank : together[host])
            if (rank != here) used.insert(edge(here, rank));
          const std::uint32_t there = size.kind == wire::ScheduleKind::host_ring
                                          ? delegates.of((host + 1) % together.size())
                                          : owner;
          if (there != here) used.insert(edge(here, there));
        }
      }
      continue;
    }
    if (size.kind == wire::ScheduleKind::ring) {
      for (std::size_t i = 0; i < world; ++i) {
        used.insert(edge(plan.order[i], plan.order[(i + 1) % world]));
      }
      continue;
    }
    for (std::uint32_t owner = 0; owner < size.shares.size(); ++owner) {
      if (size.shares[owner] == 0) continue;
      for (std::uint32_t other = 0; other < world; ++other) {
        if (other != owner) used.insert(edge(owner, other));
      }
    }
  }
  return used;
}

std::vector<std::uint32_t> hosts(std::uint32_t world, const std::set<Edge>& shared) {
  std::vector<std::uint32_t> host(world);
  std::vector<std::vector<std::uint32_t>> ranks;  // by host
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    const auto home = std::find_if(ranks.begin(), ranks.end(), [&](const auto& there) {
      return std::all_of(there.begin(), there.end(), [&](std::uint32_t other) {
        return shared.contains({other, rank});
      });
    });
    host[rank] = static_cast<std::uint32_t>(home - ranks.begin());
    if (home == ranks.end()) {
      ranks.push_back({rank});
    } else {
      home->push_back(rank);
    }
  }
  return host;
}

bool on_one_host(const wire::Plan& plan) {
  return plan.hosts.size() > 1 && std::all_of(plan.hosts.begin(), plan.hosts.end(),
                                              [](std::uint32_t host) { return host == 0; });
}

std::uint64_t hash(const wire::Plan& plan) {
  wire::Bytes bytes;
  wire::Writer writer(bytes);
  writer(plan);
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace pccl::topology
