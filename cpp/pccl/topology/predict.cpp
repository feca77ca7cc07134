#include "pccl/topology/predict.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "pccl/topology/regions.h"

namespace pccl::topology {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Cost of a hop besides its path's delay: system calls, a wake-up. Matters only for tiny delays.
constexpr double kHopSeconds = 30e-6;
constexpr double kWorthIt = 1.25;
constexpr double kWorthSeconds = 1e-3;
constexpr double kWorse = 1.1;

// The bytes that a schedule moves between sites.
class Loads {
 public:
  explicit Loads(const Terrain& terrain) : terrain_(terrain), sent_(n() * n(), 0) {}
  void add(std::size_t from, std::size_t to, double bytes) { sent_[from * n() + to] += bytes; }
  // The busy time of the busiest up-link, down-link, pair or path between regions. `shared`: pairs
  // of sites in different regions have no limit of their own, only that of all such pairs.
  [[nodiscard]] double seconds(bool shared) const {
    const Network& net = terrain_.net;
    const std::size_t count = terrain_.between.empty() ? 0 : regions();
    std::vector<double> up(n(), 0);
    std::vector<double> down(n(), 0);
    std::vector<double> across(count * count, 0);
    double most = 0;
    for (std::size_t a = 0; a < n(); ++a) {
      for (std::size_t b = 0; b < n(); ++b) {
        const double bytes = sent_[a * n() + b];
        if (bytes <= 0) continue;
        up[a] += bytes;
        down[b] += bytes;
        const bool leaves = count > 0 && region(a) != region(b);
        if (leaves) across[region(a) * count + region(b)] += bytes;
        if (!leaves || !shared || net.path_of(a, b) <= 0)
          most = std::max(most, bytes / net.path_of(a, b));
      }
    }
    for (std::size_t site = 0; site < n(); ++site)
      most = std::max({most, up[site] / net.up[site], down[site] / net.down[site]});
    for (std::size_t pair = 0; pair < across.size(); ++pair)
      if (across[pair] > 0) most = std::max(most, across[pair] / terrain_.between[pair]);
    return most;
  }

 private:
  [[nodiscard]] std::size_t n() const { return terrain_.net.size(); }
  [[nodiscard]] std::uint32_t region(std::size_t site) const { return (*terrain_.regions)[site]; }
  [[nodiscard]] std::size_t regions() const { return 1 + std::ranges::max(*terrain_.regions); }

  const Terrain& terrain_;
  std::vector<double> sent_;
};

// The size of the segments of a chunk.
double segment_of(double chunk, double limit) { return chunk / std::ceil(chunk / limit); }

double ring_seconds(const Terrain& terrain, const Flow& flow, double bytes, double limit) {
  const Network& net = terrain.net;
  const std::size_t n = net.size();
  const auto next = [&](std::size_t p) { return flow.order[(p + 1) % n]; };
  Loads loads(terrain);
  double slowest = kInfinity;
  std::vector<double> rate(n);  // of the hop from each position
  std::vector<double> delay(n);
  for (std::size_t p = 0; p < n; ++p) {
    const std::uint32_t site = flow.order[p];
    rate[p] = net.rate_of(site, next(p));
    delay[p] = net.delay_of(site, next(p)) + kHopSeconds;
    slowest = std::min(slowest, rate[p]);
    // All partial results except its own chunk's, all results except the next site's.
    loads.add(site, next(p), (2 - flow.owned[site] - flow.owned[next(p)]) * bytes);
  }
  double serial = 0;
  double late = 0;
  for (std::size_t home = 0; home < n; ++home) {
    const double chunk = flow.owned[flow.order[home]] * bytes;
    if (chunk <= 0) continue;
    const double segment = segment_of(chunk, limit);
    double way = (chunk - segment) / slowest;
    double delays = 0;
    for (std::size_t p = 0; p < n; ++p) {
      const int times = (p == home ? 0 : 1) + ((p + 1) % n == home ? 0 : 1);
      way += times * segment / rate[p];
      delays += times * delay[p];
    }
    serial = std::max(serial, way);
    late = std::max(late, delays);
  }
  return std::max(loads.seconds(false), serial) + late;
}

double direct_seconds(const Terrain& terrain, const Flow& flow, double bytes, double limit) {
  const Network& net = terrain.net;
  const std::size_t n = net.size();
  const double others = static_cast<double>(n) - 1;
  Loads loads(terrain);
  double serial = 0;
  double late = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double own = flow.owned[i];
    // Each direction carries the sum of both shares: contributions to one end, results of the
    // other.
    for (std::size_t j = 0; j < n; ++j)
      if (j != i) loads.add(i, j, (own + flow.owned[j]) * bytes);
    if (own <= 0) continue;
    const double chunk = own * bytes;
    double in = others * chunk / net.down[i];
    double out = others * chunk / net.up[i];
    double delay_in = 0;
    double delay_out = 0;
    for (std::size_t j = 0; j < n; ++j) {
      if (j == i) continue;
      in = std::max(in, chunk / net.rate_of(j, i));
      out = std::max(out, chunk / net.rate_of(i, j));
      delay_in = std::max(delay_in, net.delay_of(j, i));
      delay_out = std::max(delay_out, net.delay_of(i, j));
    }
    // Results are sent while contributions arrive, one segment behind them.
    serial =
        std::max(serial, std::max(in, out) + std::min(in, out) * segment_of(chunk, limit) / chunk);
    late = std::max(late, delay_in + delay_out + 2 * kHopSeconds);
  }
  return std::max(loads.seconds(false), serial) + late;
}

// Assumes of the network's own regions that a used pair of sites in different regions has the
// capacity of all such pairs to itself. If each pair has its own limit, this takes as long as
// `direct` with equal shares: the used pairs carry as much.
double regional_seconds(const Terrain& terrain, const Flow& flow, double bytes, double limit) {
  const Network& net = terrain.net;
  const std::size_t n = net.size();
  std::vector<std::uint32_t> sites(n);
  std::iota(sites.begin(), sites.end(), 0U);
  const Hierarchy levels = hierarchy(each_alone(sites), flow.regions);
  const std::size_t count = levels.regions.size();
  const bool own = terrain.regions == levels.region_of;
  Loads loads(terrain);
  double serial = 0;
  double late = 0;
  for (std::uint32_t owner = 0; owner < n; ++owner) {
    const double chunk = flow.owned[owner] * bytes;
    if (chunk <= 0) continue;
    const Tree tree(levels, owner);
    std::vector<double> below(n, 0);
    double near = 0;
    double far = 0;
    double stage = 0;  // the slowest stage of a segment's path
    for (std::uint32_t site = 0; site < n; ++site) {
      const std::uint32_t above = tree.above(site);
      if (site == above) continue;
      below[above] += 1;
      const std::uint32_t here = levels.region_of[site];
      const std::uint32_t there = levels.region_of[above];
      for (const auto& [from, to] : {std::pair{site, above}, std::pair{above, site}}) {
        loads.add(from, to, chunk);
        double rate = net.rate_of(from, to);
        if (own && here != there && rate > 0) {
          const std::size_t way = levels.region_of[from] * count + levels.region_of[to];
          rate = std::min({net.up[from], net.down[to], terrain.between[way]});
        }
        stage = std::max(stage, chunk / rate);
      }
      double& delay = here == there ? near : far;
      delay = std::max({delay, net.delay_of(site, above), net.delay_of(above, site)});
    }
    for (std::size_t site = 0; site < n; ++site)
      stage = std::max(stage, below[site] * chunk / std::min(net.up[site], net.down[site]));
    // To the region's delegate, on to the owner, and the same path back.
    serial = std::max(serial, stage * (1 + 3 * segment_of(chunk, limit) / chunk));
    late = std::max(late, 2 * (near + far + 2 * kHopSeconds));
  }
  return std::max(loads.seconds(own), serial) + late;
}

}  // namespace

Flow::Way way_of(wire::ScheduleKind kind) {
  switch (kind) {
    case wire::ScheduleKind::ring:
    case wire::ScheduleKind::host_ring:
      return Flow::Way::around;
    case wire::ScheduleKind::regional:
      return Flow::Way::regional;
    default:
      return Flow::Way::straight;
  }
}

Terrain::Terrain(Network network) : net(std::move(network)) {
  const auto found = topology::regions(net);
  if (!found) return;
  guess_lines(net, *found);
  divide(*found);
}

void Terrain::divide(const std::vector<std::uint32_t>& into) {
  regions = into;
  between = between_regions(net, into);
}

HostRanks each_alone(const std::vector<std::uint32_t>& order) {
  HostRanks sites;
  for (const std::uint32_t rank : order) sites.push_back({rank});
  return sites;
}

std::vector<double> owned_by(const HostRanks& sites, const std::vector<std::uint32_t>& shares) {
  std::vector<double> owned;
  double total = 0;
  for (const auto& ranks : sites) {
    double sum = 0;
    for (const std::uint32_t rank : ranks) sum += shares[rank];
    owned.push_back(sum);
    total += sum;
  }
  for (double& share : owned) share /= total;
  return owned;
}

double seconds(const Terrain& terrain, const Flow& flow, std::uint64_t bytes,
               std::uint32_t segment_bytes) {
  if (terrain.net.size() < 2 || bytes == 0) return 0;
  const auto of = flow.way == Flow::Way::around     ? ring_seconds
                  : flow.way == Flow::Way::straight ? direct_seconds
                                                    : regional_seconds;
  return of(terrain, flow, static_cast<double>(bytes), segment_bytes);
}

double predict(const wire::Plan& plan, const wire::RateTable& rates, std::uint64_t bytes) {
  const wire::SizeClass& size = size_class(plan, bytes, false);
  const bool regional = size.kind == wire::ScheduleKind::regional;
  const Hierarchy levels = hierarchy(plan);
  const HostRanks sites = regional                   ? levels.hosts
                          : between_hosts(size.kind) ? by_host(plan.order, plan.hosts)
                                                     : each_alone(plan.order);
  Flow flow{way_of(size.kind), {}, {}};
  flow.order.resize(sites.size());
  std::iota(flow.order.begin(), flow.order.end(), 0U);
  flow.owned = size.kind == wire::ScheduleKind::ring
                   ? owned_by(sites, std::vector<std::uint32_t>(plan.order.size(), 1))
                   : owned_by(sites, size.shares);
  Terrain terrain(network(rates, sites));
  if (regional) {
    flow.regions = levels.region_of;
    // Those of a larger group may be regions without a line of their own.
    if (sites.size() <= kMaxMesh) terrain.divide(levels.region_of);
  }
  return seconds(terrain, flow, bytes, plan.segment_bytes);
}

double lower_bound(const Network& network, std::uint64_t bytes) {
  const std::size_t n = network.size();
  if (n < 2) return 0;
  const auto array = static_cast<double>(bytes);
  double bound = 0;
  double all_up = 0;
  double all_down = 0;
  for (std::size_t i = 0; i < n; ++i) {
    double out = 0;
    double in = 0;
    for (std::size_t j = 0; j < n; ++j) {
      if (i == j) continue;
      out += network.path_of(i, j);
      in += network.path_of(j, i);
    }
    out = std::min(out, network.up[i]);
    in = std::min(in, network.down[i]);
    bound = std::max({bound, array / out, array / in});
    all_up += out;
    all_down += in;
  }
  const double all = 2 * (static_cast<double>(n) - 1) * array;
  return std::max({bound, all / all_up, all / all_down});
}

bool worth_changing(const wire::Plan& present, const wire::Plan& other,
                    const wire::RateTable& rates) {
  bool better = false;
  for (const std::uint64_t bytes :
       {4ULL << 10, 64ULL << 10, 1ULL << 20, 16ULL << 20, 256ULL << 20}) {
    const double now = predict(present, rates, bytes);
    const double then = predict(other, rates, bytes);
    if (then > kWorse * now) return false;
    better = better || (now > kWorthIt * then && now - then > kWorthSeconds);
  }
  return better;
}

}  // namespace pccl::topology
