// The best ring of sites: see best_ring in rates.h.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "pccl/topology/rates.h"

namespace pccl::topology {
namespace {

using Order = std::vector<std::uint32_t>;

// The rate in steps of 5 %, from 1; 0: the pair is unusable. Computed in integers, so that it is
// equal on all machines.
std::uint32_t level_of(double bytes_per_s) {
  if (bytes_per_s <= 0) return 0;
  const auto kilobytes = static_cast<std::uint64_t>(bytes_per_s / 1000);
  std::uint32_t level = 1;
  for (std::uint64_t reached = 1; reached < kilobytes; reached += reached / 20 + 1) ++level;
  return level;
}

// The properties of pairs: [from * n + to].
struct Graph {
  std::size_t n = 0;
  std::vector<std::uint32_t> level;
  std::vector<std::uint64_t> delay;  // nanoseconds
};

constexpr std::uint64_t kFar = std::numeric_limits<std::uint64_t>::max() / 4;

// The ring of least delay over pairs of at least `level`, from site 0. cost[set][last] is the least
// delay of a path that begins at 0, visits `set` of the other sites and ends at `last`.
std::optional<Order> shortest(const Graph& graph, std::uint32_t level) {
  const std::size_t others = graph.n - 1;
  const auto hop = [&](std::size_t from, std::size_t to) {
    const std::size_t at = from * graph.n + to;
    return graph.level[at] >= level ? graph.delay[at] : kFar;
  };
  const std::size_t sets = std::size_t{1} << others;
  std::vector<std::uint64_t> cost(sets * others, kFar);
  std::vector<std::uint8_t> before(sets * others, 0);
  for (std::size_t last = 0; last < others; ++last)
    cost[(std::size_t{1} << last) * others + last] = hop(0, last + 1);
  for (std::size_t set = 1; set < sets; ++set) {
    for (std::size_t last = 0; last < others; ++last) {
      const std::uint64_t so_far = cost[set * others + last];
      if (so_far >= kFar) continue;
      for (std::size_t next = 0; next < others; ++next) {
        if (set >> next & 1) continue;
        const std::size_t at = (set | std::size_t{1} << next) * others + next;
        const std::uint64_t there = so_far + hop(last + 1, next + 1);
        if (there >= cost[at]) continue;
        cost[at] = there;
        before[at] = static_cast<std::uint8_t>(last);
      }
    }
  }
  std::size_t set = sets - 1;
  std::uint64_t least = kFar;
  std::size_t last = 0;
  for (std::size_t i = 0; i < others; ++i) {
    const std::uint64_t whole = cost[set * others + i] + hop(i + 1, 0);
    if (whole >= least) continue;
    least = whole;
    last = i;
  }
  if (least >= kFar) return std::nullopt;
  Order order;
  while (set != 0) {
    order.push_back(static_cast<std::uint32_t>(last + 1));
    const std::size_t previous = before[set * others + last];
    set &= ~(std::size_t{1} << last);
    last = previous;
  }
  order.push_back(0);
  std::reverse(order.begin(), order.end());
  return order;
}

std::optional<Order> exact(const Graph& graph) {
  std::vector<std::uint32_t> levels;
  for (const std::uint32_t level : graph.level) {
    if (level > 0) levels.push_back(level);
  }
  std::sort(levels.begin(), levels.end());
  levels.erase(std::unique(levels.begin(), levels.end()), levels.end());
  // The highest level at which there is a ring.
  std::optional<Order> best;
  std::size_t low = 0;
  std::size_t high = levels.size();
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (auto order = shortest(graph, levels[middle])) {
      best = std::move(order);
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return best;
}

// The cost of a ring: its lowest level, the number of pairs with that level, its delay.
struct Badness {
  std::uint32_t level = 0;
  std::size_t at_level = 0;
  std::uint64_t delay = 0;
  bool operator<(const Badness& other) const {
    if (level != other.level) return level > other.level;
    return std::tie(at_level, delay) < std::tie(other.at_level, other.delay);
  }
};

Badness judge(const Graph& graph, const Order& order) {
  Badness bad{std::numeric_limits<std::uint32_t>::max(), 0, 0};
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::size_t at = order[i] * graph.n + order[(i + 1) % order.size()];
    if (graph.level[at] < bad.level) {
      bad.level = graph.level[at];
      bad.at_level = 0;
    }
    if (graph.level[at] == bad.level) ++bad.at_level;
    bad.delay += graph.delay[at];
  }
  return bad;
}

// A ring that begins at `start` and always continues with the best next site: by level, then delay.
Order greedy(const Graph& graph, std::uint32_t start) {
  Order order{start};
  std::vector<bool> used(graph.n, false);
  used[start] = true;
  while (order.size() < graph.n) {
    std::optional<std::uint32_t> best;
    const std::size_t row = order.back() * graph.n;
    for (std::uint32_t next = 0; next < graph.n; ++next) {
      if (used[next]) continue;
      if (!best || graph.level[row + next] > graph.level[row + *best] ||
          (graph.level[row + next] == graph.level[row + *best] &&
           graph.delay[row + next] < graph.delay[row + *best])) {
        best = next;
      }
    }
    used[*best] = true;
    order.push_back(*best);
  }
  return order;
}

// Reverses runs (2-opt) and moves runs of up to three sites (or-opt) while that helps. Considers a
// bounded number of rings: 0.2 s in all for 64 sites, as the master has other work.
void improve(const Graph& graph, Order& order) {
  int budget = 80'000;
  Badness bad = judge(graph, order);
  const auto better = [&](const Order& other) {
    --budget;
    const Badness now = judge(graph, other);
    if (!(now < bad)) return false;
    bad = now;
    order = other;
    return true;
  };
  const std::size_t n = order.size();
  for (bool moved = true; moved && budget > 0;) {
    moved = false;
    for (std::size_t i = 0; i < n && budget > 0; ++i) {
      for (std::size_t j = i + 1; j < n; ++j) {
        Order other = order;
        std::reverse(other.begin() + static_cast<std::ptrdiff_t>(i),
                     other.begin() + static_cast<std::ptrdiff_t>(j) + 1);
        moved = better(other) || moved;
      }
      for (std::size_t length = 1; length <= 3 && i + length <= n; ++length) {
        for (std::size_t to = 0; to + length <= n; ++to) {
          if (to == i) continue;
          Order other = order;
          const auto from = other.begin() + static_cast<std::ptrdiff_t>(i);
          const auto end = from + static_cast<std::ptrdiff_t>(length);
          const Order run(from, end);
          other.erase(from, end);
          other.insert(other.begin() + static_cast<std::ptrdiff_t>(to), run.begin(), run.end());
          moved = better(other) || moved;
        }
      }
    }
  }
}

std::optional<Order> search(const Graph& graph) {
  std::optional<Order> best;
  Badness least;
  constexpr std::uint32_t kStarts = 8;
  for (std::uint32_t start = 0; start < kStarts; ++start) {
    Order order(graph.n);
    std::iota(order.begin(), order.end(), 0U);
    const auto n = static_cast<std::uint32_t>(graph.n);
    if (start > 0) order = greedy(graph, (start - 1) * n / (kStarts - 1));
    improve(graph, order);
    const Badness bad = judge(graph, order);
    if (best && !(bad < least)) continue;
    best = order;
    least = bad;
  }
  if (least.level == 0) return std::nullopt;
  std::rotate(best->begin(), std::find(best->begin(), best->end(), 0U), best->end());
  return best;
}

// Returns the lexicographically first ring that is as good as `best`: itself, its reverse, or the
// sites in order.
Order plainest(const Graph& graph, Order best) {
  const Badness least = judge(graph, best);
  Order other = best;
  std::reverse(other.begin() + 1, other.end());
  Order plain(graph.n);
  std::iota(plain.begin(), plain.end(), 0U);
  for (Order& ring : {std::ref(other), std::ref(plain)}) {
    const Badness bad = judge(graph, ring);
    if (bad.level >= least.level && bad.delay <= least.delay && ring < best) best = ring;
  }
  return best;
}

}  // namespace

std::optional<std::vector<std::uint32_t>> best_ring(const Network& network) {
  Graph graph;
  graph.n = network.size();
  if (graph.n == 0) return Order{};
  if (graph.n == 1) return Order{0};
  for (std::size_t from = 0; from < graph.n; ++from) {
    for (std::size_t to = 0; to < graph.n; ++to) {
      graph.level.push_back(level_of(network.rate_of(from, to)));
      graph.delay.push_back(static_cast<std::uint64_t>(network.delay_of(from, to) * 1e9));
    }
  }
  std::optional<Order> best = graph.n <= kExactRing ? exact(graph) : search(graph);
  if (best) best = plainest(graph, std::move(*best));
  return best;
}

}  // namespace pccl::topology
