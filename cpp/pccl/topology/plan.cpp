#include "pccl/topology/plan.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <limits>
#include <numeric>

namespace pccl::topology {
namespace {

Edge edge(std::uint32_t a, std::uint32_t b) { return a < b ? Edge{a, b} : Edge{b, a}; }

// Extends `order` to a ring over all ranks that avoids `unusable`, trying low ranks first. `budget`
// bounds the search: with few unusable links a ring is found at once, with very many the answer
// "none" may be wrong for large worlds.
bool extend_ring(std::vector<std::uint32_t>& order, std::vector<bool>& used, std::uint32_t world,
                 const std::set<Edge>& unusable, int& budget) {
  if (--budget < 0) return false;
  if (order.size() == world) return !unusable.contains(edge(order.back(), order.front()));
  for (std::uint32_t next = 0; next < world; ++next) {
    if (used[next] || unusable.contains(edge(order.back(), next))) continue;
    used[next] = true;
    order.push_back(next);
    if (extend_ring(order, used, world, unusable, budget)) return true;
    order.pop_back();
    used[next] = false;
  }
  return false;
}

}  // namespace

std::optional<wire::Plan> make_plan(std::uint32_t world, std::uint32_t segment_bytes,
                                    const std::set<Edge>& unusable, const Thresholds& thresholds) {
  wire::Plan plan;
  plan.segment_bytes = segment_bytes;
  if (unusable.empty()) {
    plan.order.resize(world);
    std::iota(plan.order.begin(), plan.order.end(), 0U);
  } else {
    std::vector<bool> used(world, false);
    used[0] = true;
    plan.order = {0};
    int budget = 100'000;
    if (!extend_ring(plan.order, used, world, unusable, budget)) return std::nullopt;
  }
  const std::vector<std::uint32_t> equal(world, 1);
  if (unusable.empty() && world <= kMaxMesh) {
    std::vector<std::uint32_t> first(world, 0);
    if (world > 0) first[0] = 1;
    plan.classes.push_back({thresholds.single_owner_bytes, wire::ScheduleKind::direct, first});
    plan.classes.push_back({thresholds.direct_bytes, wire::ScheduleKind::direct, equal});
  }
  plan.classes.push_back(
      {std::numeric_limits<std::uint64_t>::max(), wire::ScheduleKind::ring, equal});
  return plan;
}

const wire::SizeClass& size_class(const wire::Plan& plan, std::uint64_t bytes, bool widens) {
  const wire::SizeClass* chosen = &plan.classes.back();
  for (const wire::SizeClass& candidate : plan.classes) {
    if (bytes <= candidate.max_bytes) {
      chosen = &candidate;
      break;
    }
  }
  if (widens && chosen->kind == wire::ScheduleKind::ring) {
    // The largest direct class: its shares are the balanced ones.
    const auto direct = std::find_if(plan.classes.rbegin(), plan.classes.rend(), [](const auto& c) {
      return c.kind == wire::ScheduleKind::direct;
    });
    if (direct != plan.classes.rend()) chosen = &*direct;
  }
  return *chosen;
}

bool valid(const wire::Plan& plan, std::size_t world) {
  if (plan.segment_bytes < 64 || plan.segment_bytes > (1U << 24)) return false;
  if (world == 0 || plan.order.size() != world || plan.classes.empty()) return false;
  if (!plan.hosts.empty() && plan.hosts.size() != world) return false;
  std::vector<bool> seen(world, false);
  for (const std::uint32_t rank : plan.order) {
    if (rank >= world || seen[rank]) return false;
    seen[rank] = true;
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
  for (const wire::SizeClass& size : plan.classes) {
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
