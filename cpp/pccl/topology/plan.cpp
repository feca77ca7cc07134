#include "pccl/topology/plan.h"

#include <xxhash.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

namespace pccl::topology {
namespace {

Edge edge(std::uint32_t a, std::uint32_t b) { return std::minmax(a, b); }

// A ring may use none of `never`, and at most `spare` of `unusable`.
struct RingLimits {
  const std::set<Edge>& unusable;
  const std::set<Edge>& never;
  std::size_t spare = 0;
};

// Extends `order` to a ring over all ranks within `limits`, trying `candidates` in their order.
// `budget` bounds the search. With few unusable links a ring is found at once; with very many in a
// large group the search may miss one.
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

// A lower bound for the unusable links in any ring: every rank needs two neighbours.
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

// The ring with the fewest of `unusable`, at most `most`; empty: none was found.
std::vector<std::uint32_t> cheapest_ring(const std::vector<std::uint32_t>& candidates,
                                         const std::set<Edge>& unusable,
                                         const std::set<Edge>& never, std::size_t most) {
  const std::size_t first = least_spare(candidates.size(), unusable);
  int budget = 100'000;  // for all searches together: the master calls this often
  for (std::size_t spare = first; spare <= std::min(most, candidates.size()); ++spare) {
    std::vector<std::uint32_t> order{candidates.front()};
    std::vector<bool> used(candidates.size(), false);
    used[order.front()] = true;
    if (extend_ring(order, used, candidates, {unusable, never, spare}, budget)) return order;
  }
  return {};
}

// The plan without regions: a ring for large arrays and, where links allow, `direct` for others.
std::optional<wire::Plan> flat_plan(std::uint32_t world, std::uint32_t segment_bytes,
                                    const std::set<Edge>& unusable,
                                    const std::vector<std::uint32_t>& hosts,
                                    const Thresholds& thresholds = {}) {
  wire::Plan plan;
  plan.segment_bytes = segment_bytes;
  plan.hosts = hosts;
  std::vector<std::uint32_t> ranks(world);
  std::iota(ranks.begin(), ranks.end(), 0U);
  const HostRanks together = by_host(ranks, hosts);
  // Ranks of a host side by side, so that a ring leaves each host once.
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
  const std::vector<std::uint32_t> equal(world, 1);
  // Only ranks with a link to every other rank can be owners.
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
  std::size_t largest = 0;
  for (const auto& there : together) largest = std::max(largest, there.size());
  if (has_ring && together.size() > 1 && largest > 1 && largest <= kMaxMesh) {
    if (!owned) first[0] = 1;
    choose(wire::ScheduleKind::host_direct, wire::ScheduleKind::host_ring, equal,
           together.size() <= thresholds.mesh);
    if (avoids(plan, unusable)) return plan;
  }
  choose(wire::ScheduleKind::direct, wire::ScheduleKind::ring, owners,
         owned && (world <= thresholds.mesh || !has_ring));
  return plan;
}

// Adds classes by regions to a plan that has a ring only. Few unusable links are avoided by other
// borders between regions, or by keeping only the class with a single owner.
void add_regions(wire::Plan& plan, const std::set<Edge>& unusable, const Thresholds& thresholds) {
  const std::size_t world = plan.order.size();
  std::vector<std::uint32_t> ranks(world);
  std::iota(ranks.begin(), ranks.end(), 0U);
  const HostRanks hosts = by_host(ranks, plan.hosts);
  std::size_t largest = 0;
  for (const auto& there : hosts) largest = std::max(largest, there.size());
  if (plan.classes.size() > 1 || hosts.size() <= thresholds.mesh || largest > kMaxMesh) return;
  const std::vector<std::uint32_t> equal(world, 1);
  std::vector<std::uint32_t> single(world, 0);
  const auto reaches_all = [&](std::uint32_t rank) {
    return std::ranges::none_of(
        unusable, [&](const Edge& pair) { return pair.first == rank || pair.second == rank; });
  };
  const auto owner = std::ranges::find_if(ranks, reaches_all);
  single[owner == ranks.end() ? 0 : *owner] = 1;
  using Kind = wire::ScheduleKind;
  const wire::SizeClass small{thresholds.single_owner_bytes, Kind::regional, single};
  const wire::SizeClass medium{thresholds.short_bytes(hosts.size()), Kind::regional, equal};
  const std::vector<std::uint32_t> regions = even_regions(hosts.size());
  const auto turns = static_cast<std::size_t>(std::ranges::count(regions, 0U));
  for (const auto& classes : {std::vector{small, medium}, std::vector{small}}) {
    for (std::size_t turn = 0; turn < turns; ++turn) {
      wire::Plan made = plan;
      made.classes.insert(made.classes.begin(), classes.begin(), classes.end());
      made.regions.resize(world);
      for (std::size_t host = 0; host < hosts.size(); ++host)
        for (const std::uint32_t rank : hosts[host])
          made.regions[rank] = regions[(host + turn) % hosts.size()];
      if (!unusable.empty() && !avoids(made, unusable)) continue;
      plan = std::move(made);
      return;
    }
  }
}

}  // namespace

std::optional<wire::Plan> make_plan(std::uint32_t world, std::uint32_t segment_bytes,
                                    const std::set<Edge>& unusable,
                                    const std::vector<std::uint32_t>& hosts,
                                    const Thresholds& thresholds) {
  std::optional<wire::Plan> plan = flat_plan(world, segment_bytes, unusable, hosts, thresholds);
  const auto around = [](const wire::SizeClass& size) {
    return size.kind == wire::ScheduleKind::ring || size.kind == wire::ScheduleKind::host_ring;
  };
  if (plan && around(plan->classes.back())) add_regions(*plan, unusable, thresholds);
  return plan;
}

std::set<Edge> detours(std::uint32_t world, const std::set<Edge>& unusable,
                       const std::set<Edge>& never, std::size_t most,
                       const std::vector<std::uint32_t>& hosts) {
  const auto fits = [&](const std::set<Edge>& taken) {
    return !taken.empty() && taken.size() <= most && both(taken, never).empty();
  };
  if (world < 2) return {};
  // The plan if all links worked: its hierarchy or `direct` schedule is worth a few more detours.
  const std::optional<wire::Plan> free = flat_plan(world, 64, {}, hosts);
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
  // A rank can own everything with a detour for each link that it lacks.
  std::vector<std::size_t> lacks(world, 0);
  for (const auto& [a, b] : unusable)
    for (const std::uint32_t rank : {a, b}) lacks[rank] += never.contains({a, b}) ? most + 1 : 1;
  if (std::any_of(lacks.begin(), lacks.end(), [&](std::size_t links) { return links <= most; }))
    return true;
  return flat_plan(world, 64, unusable, {}).has_value() ||
         (most > 0 && !detours(world, unusable, never, most).empty());
}

HostRanks by_host(std::span<const std::uint32_t> order, std::span<const std::uint32_t> hosts) {
  HostRanks ranks;
  std::map<std::uint32_t, std::size_t> indices;
  for (std::size_t i = 0; i < order.size(); ++i) {
    // If hosts are unknown, every rank is a host of its own.
    const std::uint32_t host =
        hosts.size() == order.size() ? hosts[order[i]] : static_cast<std::uint32_t>(i);
    const std::size_t index = indices.try_emplace(host, ranks.size()).first->second;
    if (index == ranks.size()) ranks.emplace_back();
    ranks[index].push_back(order[i]);
  }
  for (auto& there : ranks) std::sort(there.begin(), there.end());
  return ranks;
}

Delegates::Delegates(const HostRanks& hosts, std::uint32_t owner) : hosts_(hosts) {
  for (std::size_t host = 0; host < hosts.size(); ++host) {
    const auto found = std::find(hosts[host].begin(), hosts[host].end(), owner);
    if (found == hosts[host].end()) continue;
    home_ = host;
    index_ = static_cast<std::size_t>(found - hosts[host].begin());
  }
}

std::uint32_t Delegates::of(std::size_t host) const {
  const std::size_t there = hosts_[host].size();
  const std::size_t here = hosts_[home_].size();
  // On a host of another size, owners of different hosts use different ranks.
  return hosts_[host][there == here ? index_ : (index_ * there / here + home_) % there];
}

Hierarchy hierarchy(const HostRanks& hosts, std::span<const std::uint32_t> regions) {
  Hierarchy found{hosts, {}, {}, {}};
  std::map<std::uint32_t, std::uint32_t> known;
  std::size_t ranks = 0;
  for (const auto& there : hosts) ranks += there.size();
  found.host_of.resize(ranks);
  for (std::uint32_t host = 0; host < hosts.size(); ++host) {
    for (const std::uint32_t rank : hosts[host]) found.host_of[rank] = host;
    const std::uint32_t region = regions.size() == ranks ? regions[hosts[host].front()] : host;
    const auto next = static_cast<std::uint32_t>(found.regions.size());
    const std::uint32_t index = known.try_emplace(region, next).first->second;
    if (index == next) found.regions.emplace_back();
    found.regions[index].push_back(host);
    found.region_of.push_back(index);
  }
  return found;
}

std::vector<std::uint32_t> even_regions(std::size_t hosts) {
  std::size_t count = 1;
  while ((count + 1) * (count + 1) <= hosts) ++count;
  std::vector<std::uint32_t> regions(hosts);
  for (std::size_t host = 0; host < hosts; ++host)
    regions[host] = static_cast<std::uint32_t>(host * count / hosts);
  return regions;
}

std::size_t largest_region(const Hierarchy& levels) {
  std::size_t most = 0;
  for (const auto& region : levels.regions) {
    std::size_t ranks = 0;
    for (const std::uint32_t host : region) ranks += levels.hosts[host].size();
    most = std::max(most, ranks);
  }
  return most;
}

Hierarchy hierarchy(const wire::Plan& plan) {
  std::vector<std::uint32_t> ranks(plan.order.size());
  std::iota(ranks.begin(), ranks.end(), 0U);
  return hierarchy(by_host(ranks, plan.hosts), plan.regions);
}

Tree::Tree(const Hierarchy& levels, std::uint32_t owner)
    : levels_(levels),
      owner_(owner),
      of_hosts_(levels.hosts, owner),
      of_regions_(levels.regions, static_cast<std::uint32_t>(of_hosts_.home())) {}

std::uint32_t Tree::above(std::uint32_t rank) const {
  const std::uint32_t host = levels_.host_of[rank];
  const std::uint32_t of_host = of_hosts_.of(host);
  if (rank != of_host) return of_host;
  const std::uint32_t speaks = of_regions_.of(levels_.region_of[host]);
  return speaks == host ? owner_ : of_hosts_.of(speaks);
}

bool Tree::leaves_region(std::uint32_t rank) const {
  const std::uint32_t host = levels_.host_of[rank];
  const std::size_t region = levels_.region_of[host];
  return region != of_regions_.home() && host == of_regions_.of(region) &&
         rank == of_hosts_.of(host);
}

const wire::SizeClass& size_class(const wire::Plan& plan, std::uint64_t bytes, bool widens,
                                  bool coded) {
  const auto fits = std::ranges::find_if(
      plan.classes, [&](const wire::SizeClass& size) { return bytes <= size.max_bytes; });
  const wire::SizeClass* chosen = fits == plan.classes.end() ? &plan.classes.back() : &*fits;
  const bool many_hops = (chosen->kind == wire::ScheduleKind::ring && (widens || coded)) ||
                         (chosen->kind == wire::ScheduleKind::host_ring && coded);
  if (!many_hops) return *chosen;
  // The largest class of a kind: its shares are the balanced ones.
  const auto largest = [&](const auto& is_it) {
    return std::find_if(plan.classes.rbegin(), plan.classes.rend(), is_it);
  };
  auto found = largest([&](const wire::SizeClass& size) {
    return size.kind == wire::ScheduleKind::direct ||
           (coded && size.kind == wire::ScheduleKind::host_direct);
  });
  if (found == plan.classes.rend()) {
    found = largest([](const wire::SizeClass& size) {
      return size.kind == wire::ScheduleKind::regional && owned_by_all(size);
    });
  }
  return found == plan.classes.rend() ? *chosen : *found;
}

bool owned_by_all(const wire::SizeClass& size) {
  return size.kind == wire::ScheduleKind::ring || std::ranges::count(size.shares, 0U) == 0;
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
  return std::ranges::all_of(plan.classes, [&](const wire::SizeClass& size) {
    return size.shares.size() == world &&
           std::ranges::any_of(size.shares, [](std::uint32_t share) { return share > 0; });
  });
}

std::set<Edge> edges(const wire::Plan& plan) {
  std::set<Edge> used;
  const std::size_t world = plan.order.size();
  std::vector<bool> known(world * world, false);
  const auto use = [&](std::uint32_t a, std::uint32_t b) {
    if (a == b || known[a * world + b]) return;
    known[a * world + b] = true;
    used.insert(edge(a, b));
  };
  const HostRanks together = by_host(plan.order, plan.hosts);
  const Hierarchy levels = hierarchy(plan);
  for (const wire::SizeClass& size : plan.classes) {
    if (size.kind == wire::ScheduleKind::ring) used.merge(ring_edges(plan.order));
    for (std::uint32_t owner = 0; owner < size.shares.size(); ++owner) {
      if (size.shares[owner] == 0 || size.kind == wire::ScheduleKind::ring) continue;
      if (size.kind == wire::ScheduleKind::regional) {
        const Tree tree(levels, owner);
        for (std::uint32_t rank = 0; rank < world; ++rank) use(rank, tree.above(rank));
      } else if (between_hosts(size.kind)) {
        const Delegates delegates(together, owner);
        for (std::size_t host = 0; host < together.size(); ++host) {
          const std::uint32_t here = delegates.of(host);
          for (const std::uint32_t rank : together[host]) use(here, rank);
          const bool around = size.kind == wire::ScheduleKind::host_ring;
          use(here, around ? delegates.of((host + 1) % together.size()) : owner);
        }
      } else {
        for (std::uint32_t other = 0; other < world; ++other) use(owner, other);
      }
    }
  }
  return used;
}

bool avoids(const wire::Plan& plan, const std::set<Edge>& unusable) {
  return both(edges(plan), unusable).empty();
}

bool between_hosts(wire::ScheduleKind kind) {
  return kind == wire::ScheduleKind::host_ring || kind == wire::ScheduleKind::host_direct;
}

std::vector<std::uint32_t> hosts(std::uint32_t world, const std::set<Edge>& shared) {
  std::vector<std::uint32_t> host(world);
  HostRanks ranks;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    const auto shares = [&](std::uint32_t other) { return shared.contains({other, rank}); };
    const auto home = std::ranges::find_if(
        ranks, [&](const auto& there) { return std::ranges::all_of(there, shares); });
    host[rank] = static_cast<std::uint32_t>(home - ranks.begin());
    if (host[rank] == ranks.size()) ranks.emplace_back();
    ranks[host[rank]].push_back(rank);
  }
  return host;
}

bool on_one_host(const wire::Plan& plan) {
  return plan.hosts.size() > 1 && std::ranges::max(plan.hosts) == 0;
}

std::uint64_t hash(const wire::Plan& plan) {
  const wire::Bytes bytes = wire::encoded(plan);
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace pccl::topology
