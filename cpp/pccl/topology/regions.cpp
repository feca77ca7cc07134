#include "pccl/topology/regions.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace pccl::topology {
namespace {

constexpr double kFar = 2;

// Sites that a chain of ways of at most `near` seconds joins have the same number; numbers ascend
// from 0 with the first site of each.
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
  const std::size_t n = network.size();
  std::vector<double> delays;
  for (std::size_t a = 0; a < n; ++a) {
    for (std::size_t b = 0; b < n; ++b)
      if (a != b && network.path_of(a, b) > 0) delays.push_back(network.delay_of(a, b));
  }
  std::sort(delays.begin(), delays.end(), std::greater<>());
  delays.erase(std::unique(delays.begin(), delays.end()), delays.end());
  for (const double near : delays) {
    std::vector<std::uint32_t> region = joined(network, near);
    const std::uint32_t count = 1 + *std::max_element(region.begin(), region.end());
    if (count == n) break;
    if (count > 1 && are_apart(network, region)) return region;
  }
  return std::nullopt;
}

std::vector<double> between_regions(const Network& network,
                                    const std::vector<std::uint32_t>& region) {
  const std::size_t count = 1 + *std::max_element(region.begin(), region.end());
  std::vector<double> all(count * count, 0);
  std::vector<bool> known(count * count, true);
  std::vector<double> up(count, 0);
  std::vector<double> down(count, 0);
  for (std::size_t a = 0; a < network.size(); ++a) {
    up[region[a]] += network.up[a];
    down[region[a]] += network.down[a];
    for (std::size_t b = 0; b < network.size(); ++b) {
      const std::size_t pair = region[a] * count + region[b];
      const double carried = network.together[a * network.size() + b];
      all[pair] += carried;
      if (carried == 0) known[pair] = false;
    }
  }
  for (std::size_t a = 0; a < count; ++a) {
    for (std::size_t b = 0; b < count; ++b)
      all[a * count + b] =
          std::min({known[a * count + b] ? all[a * count + b] : up[a], up[a], down[b]});
  }
  return all;
}

}  // namespace pccl::topology
