#include "pccl/topology/regions.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace pccl::topology {
namespace {

constexpr double kFar = 2;

// The delays on a minimum spanning tree (Prim 1957), longest first. The result of joined() changes
// only at these delays.
std::vector<double> steps(const Network& network) {
  const std::size_t n = network.size();
  constexpr double kFarthest = std::numeric_limits<double>::infinity();
  std::vector<double> near(n, kFarthest);
  std::vector<bool> reached(n, false);
  std::vector<double> found;
  std::size_t last = 0;
  for (std::size_t count = 1; count < n; ++count) {
    reached[last] = true;
    std::size_t next = n;
    for (std::size_t other = 0; other < n; ++other) {
      if (reached[other]) continue;
      if (network.path_of(last, other) > 0)
        near[other] = std::min(near[other], network.delay_of(last, other));
      if (next == n || near[other] < near[next]) next = other;
    }
    found.push_back(near[next]);
    last = next;
  }
  std::sort(found.begin(), found.end(), std::greater<>());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

// Sites joined by a chain of paths of at most `near` seconds have the same number. Numbers ascend
// from 0 in order of each region's first site.
std::vector<std::uint32_t> joined(const Network& network, double near) {
  const std::size_t n = network.size();
  constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
  std::vector<std::uint32_t> region(n, kNone);
  std::uint32_t count = 0;
  for (std::size_t first = 0; first < n; ++first) {
    if (region[first] != kNone) continue;
    std::vector<std::size_t> reached{first};
    region[first] = count;
    for (std::size_t i = 0; i < reached.size(); ++i) {
      for (std::size_t other = 0; other < n; ++other) {
        if (region[other] != kNone || network.path_of(reached[i], other) <= 0 ||
            network.delay_of(reached[i], other) > near)
          continue;
        region[other] = count;
        reached.push_back(other);
      }
    }
    ++count;
  }
  return region;
}

bool are_apart(const Network& network, const std::vector<std::uint32_t>& region) {
  double inside = 0;
  double outside = std::numeric_limits<double>::infinity();
  for (std::size_t a = 0; a < network.size(); ++a) {
    for (std::size_t b = 0; b < network.size(); ++b) {
      if (a == b || network.path_of(a, b) <= 0) continue;
      const double delay = network.delay_of(a, b);
      if (region[a] == region[b]) {
        inside = std::max(inside, delay);
      } else {
        outside = std::min(outside, delay);
      }
    }
  }
  return kFar * inside <= outside;
}

}  // namespace

std::optional<std::vector<std::uint32_t>> regions(const Network& network) {
  for (const double near : steps(network)) {
    std::vector<std::uint32_t> region = joined(network, near);
    const std::uint32_t count = 1 + *std::max_element(region.begin(), region.end());
    if (count == network.size()) break;
    if (count > 1 && are_apart(network, region)) return region;
  }
  return std::nullopt;
}

std::vector<double> between_regions(const Network& network,
                                    const std::vector<std::uint32_t>& region) {
  const std::size_t n = network.size();
  const std::size_t count = 1 + *std::max_element(region.begin(), region.end());
  std::vector<double> all(count * count, 0);
  std::vector<double> known(count * count, 0);  // pairs
  std::vector<double> used(count * count, 0);
  std::vector<double> up(count, 0);
  std::vector<double> down(count, 0);
  for (std::size_t a = 0; a < n; ++a) {
    up[region[a]] += network.up[a];
    down[region[a]] += network.down[a];
    for (std::size_t b = 0; b < n; ++b) {
      if (a == b || network.path_of(a, b) <= 0) continue;
      const std::size_t pair = region[a] * count + region[b];
      const double carried = network.together[a * n + b];
      all[pair] += carried;
      known[pair] += carried > 0 ? 1 : 0;
      used[pair] += 1;
    }
  }
  for (std::size_t a = 0; a < count; ++a) {
    for (std::size_t b = 0; b < count; ++b) {
      const std::size_t pair = a * count + b;
      const double links = std::min(up[a], down[b]);
      all[pair] = known[pair] > 0 ? std::min(links, all[pair] * used[pair] / known[pair]) : links;
    }
  }
  return all;
}

}  // namespace pccl::topology
