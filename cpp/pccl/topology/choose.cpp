#include "pccl/topology/choose.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <utility>

#include "pccl/topology/regions.h"

namespace pccl::topology {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// For a hop beside its path's delay: system calls, a wake-up. Only matters where delays are tiny.
constexpr double kHopSeconds = 30e-6;
// Predictions this close count as equal.
constexpr double kClose = 1.03;
// What members measured within a second is off by about as much, even where all links are alike: so
// uneven shares have to promise more than that.
constexpr double kUnsure = 1.25;
constexpr double kWorthIt = 1.25;
constexpr double kWorthSeconds = 1e-3;
constexpr double kWorse = 1.1;
// Shares are rounded to so many parts of the array.
constexpr std::uint32_t kShareUnits = 1 << 16;
constexpr std::uint64_t kAnySize = std::numeric_limits<std::uint64_t>::max();
// Above the largest of these, all sizes are alike.
constexpr std::uint64_t kLargestStep = std::uint64_t{1} << 32;

using Sites = HostRanks;

// A schedule as sites run it.
struct Flow {
  enum class Way : std::uint8_t { straight, around, regional };
  Way way = Way::straight;           // to the owners; a ring in `order`; from region to region
  std::vector<std::uint32_t> order;  // of sites
  std::vector<double> owned;         // by site, of the array; sum 1
};

// A network, and the regions of its sites, if it has some.
struct Terrain {
  Network net;
  std::optional<std::vector<std::uint32_t>> regions;
  std::vector<double> between;  // see between_regions

  explicit Terrain(Network network) : net(std::move(network)) {
    if (const auto found = topology::regions(net)) divide(*found);
  }
  void divide(const std::vector<std::uint32_t>& into) {
    regions = into;
    between = between_regions(net, into);
  }
};

// What a schedule has to move, in bytes.
class Loads {
 public:
  explicit Loads(const Terrain& terrain) : terrain_(terrain), sent_(n() * n(), 0) {}
  void add(std::size_t from, std::size_t to, double bytes) { sent_[from * n() + to] += bytes; }
  // For as long as the busiest up-link, down-link, pair or way between regions is at it. `shared`:
  // a pair of sites in different regions has no limit but that of all such pairs.
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
  [[nodiscard]] std::size_t regions() const {
    return 1 + *std::max_element(terrain_.regions->begin(), terrain_.regions->end());
  }

  const Terrain& terrain_;
  std::vector<double> sent_;
};

// A size class that might be, before it is known for which sizes.
struct Candidate {
  wire::ScheduleKind kind = wire::ScheduleKind::ring;
  std::vector<std::uint32_t> shares;  // by rank
  Flow flow;
};

Sites each_alone(const std::vector<std::uint32_t>& order) {
  Sites sites;
  for (const std::uint32_t rank : order) sites.push_back({rank});
  return sites;
}

Sites each_alone(std::size_t count) {
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0U);
  return each_alone(order);
}

std::vector<double> owned_by(const Sites& sites, const std::vector<std::uint32_t>& shares) {
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

// Of the segments that a chunk is cut into.
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
    // All partial results but of what it owns, all results but of what the next one owns.
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
    // Each way the sum of both shares: contributions to one end, results from the other.
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
    // Results leave as their contributions come in, but for the first segment's wait.
    serial =
        std::max(serial, std::max(in, out) + std::min(in, out) * segment_of(chunk, limit) / chunk);
    late = std::max(late, delay_in + delay_out + 2 * kHopSeconds);
  }
  return std::max(loads.seconds(false), serial) + late;
}

// A pair of sites in different regions is taken to have all that these carry together to itself. If
// it has a limit of its own instead, this takes as long as `direct` with equal shares does: the
// pairs that are used carry as much.
double regional_seconds(const Terrain& terrain, const Flow& flow, double bytes, double limit) {
  const Network& net = terrain.net;
  const std::size_t n = net.size();
  const Places places = topology::places(each_alone(n), *terrain.regions);
  const std::size_t count = places.regions.size();
  Loads loads(terrain);
  double serial = 0;
  double late = 0;
  for (std::uint32_t owner = 0; owner < n; ++owner) {
    const double chunk = flow.owned[owner] * bytes;
    if (chunk <= 0) continue;
    const Tree tree(places, owner);
    std::vector<double> below(n, 0);
    double near = 0;
    double far = 0;
    double stage = 0;  // the slowest of those that segments go through one after the other
    for (std::uint32_t site = 0; site < n; ++site) {
      const std::uint32_t above = tree.above(site);
      if (site == above) continue;
      below[above] += 1;
      const std::uint32_t here = places.region_of[site];
      const std::uint32_t there = places.region_of[above];
      for (const auto& [from, to] : {std::pair{site, above}, std::pair{above, site}}) {
        loads.add(from, to, chunk);
        double rate = net.rate_of(from, to);
        if (here != there && rate > 0) {
          const std::size_t way = places.region_of[from] * count + places.region_of[to];
          rate = std::min({net.up[from], net.down[to], terrain.between[way]});
        }
        stage = std::max(stage, chunk / rate);
      }
      double& delay = here == there ? near : far;
      delay = std::max({delay, net.delay_of(site, above), net.delay_of(above, site)});
    }
    for (std::size_t site = 0; site < n; ++site)
      stage = std::max(stage, below[site] * chunk / std::min(net.up[site], net.down[site]));
    // In to the one of the region, on to the owner, and the same way back.
    serial = std::max(serial, stage * (1 + 3 * segment_of(chunk, limit) / chunk));
    late = std::max(late, 2 * (near + far + 2 * kHopSeconds));
  }
  return std::max(loads.seconds(true), serial) + late;
}

double seconds(const Terrain& terrain, const Flow& flow, std::uint64_t bytes,
               std::uint32_t segment_bytes) {
  if (terrain.net.size() < 2 || bytes == 0) return 0;
  const auto array = static_cast<double>(bytes);
  switch (flow.way) {
    case Flow::Way::around:
      return ring_seconds(terrain, flow, array, segment_bytes);
    case Flow::Way::straight:
      return direct_seconds(terrain, flow, array, segment_bytes);
    case Flow::Way::regional:
      break;
  }
  return regional_seconds(terrain, flow, array, segment_bytes);
}

bool between_hosts(wire::ScheduleKind kind) {
  return kind == wire::ScheduleKind::host_ring || kind == wire::ScheduleKind::host_direct;
}

bool around(wire::ScheduleKind kind) {
  return kind == wire::ScheduleKind::ring || kind == wire::ScheduleKind::host_ring;
}

Flow::Way way_of(wire::ScheduleKind kind) {
  if (kind == wire::ScheduleKind::regional) return Flow::Way::regional;
  return around(kind) ? Flow::Way::around : Flow::Way::straight;
}

// Weights of sites as shares of ranks: a site's ranks own equal parts of what it owns. Largest
// remainders first, so that the sum is exact; equal shares are ones, as they are without a table.
std::vector<std::uint32_t> as_shares(const Sites& sites, std::vector<double> owned,
                                     std::uint32_t world) {
  const double crumb = 1.0 / (64.0 * static_cast<double>(sites.size()));
  double total = 0;
  for (double& share : owned) {
    if (share < crumb) share = 0;
    total += share;
  }
  std::vector<double> exact(world, 0);
  for (std::size_t site = 0; site < sites.size(); ++site) {
    for (const std::uint32_t rank : sites[site])
      exact[rank] = owned[site] / total / static_cast<double>(sites[site].size());
  }
  const bool equal = std::all_of(exact.begin(), exact.end(),
                                 [&](double share) { return std::abs(share * world - 1) < 0.01; });
  if (equal) return std::vector<std::uint32_t>(world, 1);
  std::vector<std::uint32_t> shares(world);
  std::vector<std::uint32_t> by_rest(world);
  std::iota(by_rest.begin(), by_rest.end(), 0U);
  std::uint32_t given = 0;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    exact[rank] *= kShareUnits;
    shares[rank] = static_cast<std::uint32_t>(exact[rank]);
    given += shares[rank];
  }
  std::stable_sort(by_rest.begin(), by_rest.end(), [&](std::uint32_t a, std::uint32_t b) {
    return exact[a] - shares[a] > exact[b] - shares[b];
  });
  for (std::uint32_t i = 0; given < kShareUnits; ++i, ++given) ++shares[by_rest[i % world]];
  return shares;
}

std::string figure(double value, const char* unit) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), value < 10 ? "%.2g%s" : "%.0f%s", value, unit);
  return text.data();
}

std::string duration(double value) {
  if (!std::isfinite(value)) return "never";
  if (value < 1e-3) return figure(value * 1e6, " us");
  return value < 1 ? figure(value * 1e3, " ms") : figure(value, " s");
}

std::string size_text(std::uint64_t bytes) {
  const char* unit = " B";
  for (const char* larger : {" KiB", " MiB", " GiB"}) {
    if (bytes < 1024 || bytes % 1024 != 0) break;
    bytes /= 1024;
    unit = larger;
  }
  return std::to_string(bytes) + unit;
}

std::string list(const std::vector<std::uint32_t>& numbers, const char* between) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (i == 32) return text + between + "...";
    if (i > 0) text += between;
    text += std::to_string(numbers[i]);
  }
  return text;
}

const char* plain_name(const Candidate& candidate) {
  return candidate.kind == wire::ScheduleKind::ring          ? "ring"
         : candidate.kind == wire::ScheduleKind::host_ring   ? "ring of hosts"
         : candidate.kind == wire::ScheduleKind::host_direct ? "direct between hosts"
         : candidate.kind == wire::ScheduleKind::regional    ? "by regions"
                                                             : "direct";
}

std::string described(const Candidate& candidate, const std::vector<std::uint32_t>& order) {
  std::string text = plain_name(candidate);
  if (around(candidate.kind)) return text + " " + list(order, "-");
  std::uint64_t total = 0;
  std::size_t owners = 0;
  std::size_t owner = 0;
  for (std::size_t rank = 0; rank < candidate.shares.size(); ++rank) {
    total += candidate.shares[rank];
    if (candidate.shares[rank] == 0) continue;
    ++owners;
    owner = rank;
  }
  if (owners == 1) return text + ", rank " + std::to_string(owner) + " owns all";
  if (total == candidate.shares.size()) return text + ", equal shares";
  std::vector<std::uint32_t> percent;
  for (const std::uint32_t share : candidate.shares)
    percent.push_back(static_cast<std::uint32_t>((std::uint64_t{share} * 100 + total / 2) / total));
  return text + ", shares of " + list(percent, "/") + " %";
}

// A slow site sends its last segments side by side, one on each connection, and all wait for the
// slowest of these; so none may take long: 20 ms with the link to itself.
std::uint32_t segment_for(const Network& network, std::uint32_t most) {
  constexpr double kLongest = 0.02;
  constexpr std::uint32_t kLeast = 64 << 10;
  double slowest = std::numeric_limits<double>::infinity();
  for (std::size_t site = 0; site < network.size(); ++site)
    slowest = std::min({slowest, network.up[site], network.down[site]});
  std::uint32_t bytes = kLeast;
  while (bytes < most && 2.0 * bytes <= slowest * kLongest) bytes *= 2;
  return std::min(bytes, most);
}

// The work of choose(), for several sites.
class Chooser {
 public:
  Chooser(const Situation& situation, const wire::Plan& plain, Sites sites, bool crowded,
          std::set<Edge> avoid)
      : situation_(situation),
        plain_(plain),
        sites_(std::move(sites)),
        crowded_(crowded),
        avoid_(std::move(avoid)),
        terrain_(network(situation.rates, sites_, avoid_)),
        net_(terrain_.net) {}

  // Nothing when no schedule avoids what is to be avoided.
  std::optional<Choice> run() {
    const std::optional<std::vector<std::uint32_t>> order = best_ring(net_);
    if (!order) return std::nullopt;
    plan_ = plain_;
    plan_.segment_bytes = segment_for(net_, situation_.segment_bytes);
    plan_.order.clear();
    for (const std::uint32_t site : *order)
      plan_.order.insert(plan_.order.end(), sites_[site].begin(), sites_[site].end());
    gather(*order);
    pick();
    drop_regions();
    const std::set<Edge> used = edges(plan_);
    const bool avoids = std::none_of(avoid_.begin(), avoid_.end(),
                                     [&](const Edge& bad) { return used.contains(bad); });
    if (!avoids) return std::nullopt;
    return Choice{plan_, why()};
  }

 private:
  [[nodiscard]] double time(const Candidate& candidate, std::uint64_t bytes) const {
    return seconds(terrain_, candidate.flow, bytes, plan_.segment_bytes);
  }

  void add_direct(const std::vector<std::uint32_t>& shares) {
    const auto kind = crowded_ ? wire::ScheduleKind::host_direct : wire::ScheduleKind::direct;
    candidates_.push_back({kind, shares, {Flow::Way::straight, {}, owned_by(sites_, shares)}});
  }

  // The one that owns all of small arrays: the first, unless another is clearly nearer to all.
  [[nodiscard]] std::vector<std::uint32_t> single_owner() const {
    std::vector<std::uint32_t> best;
    double least = kInfinity;
    for (const auto& ranks : sites_) {
      std::vector<std::uint32_t> shares(situation_.world, 0);
      shares[ranks.front()] = 1;
      const Flow flow{Flow::Way::straight, {}, owned_by(sites_, shares)};
      const double time =
          seconds(terrain_, flow, situation_.thresholds.single_owner_bytes, plan_.segment_bytes);
      if (!best.empty() && time * kClose >= least) continue;
      least = time;
      best = std::move(shares);
    }
    return best;
  }

  // In the order in which the plan without measurements has them, by size.
  void gather(const std::vector<std::uint32_t>& order) {
    const std::vector<std::uint32_t> equal(situation_.world, 1);
    if (sites_.size() <= kMaxMesh) {
      add_direct(single_owner());
      add_direct(equal);
      if (const auto owned = best_shares(net_))
        add_direct(as_shares(sites_, *owned, situation_.world));
    }
    const auto kind = crowded_ ? wire::ScheduleKind::host_ring : wire::ScheduleKind::ring;
    ring_ = candidates_.size();
    candidates_.push_back({kind, equal, {Flow::Way::around, order, owned_by(sites_, equal)}});
    add_regional(equal);
  }

  void add_regional(const std::vector<std::uint32_t>& equal) {
    if (!terrain_.regions || by_host(plan_.order, plan_.hosts).size() != sites_.size()) return;
    const std::vector<std::uint32_t>& region = *terrain_.regions;
    for (const std::uint32_t one : region)
      if (std::count(region.begin(), region.end(), one) > std::ptrdiff_t{kMaxMesh}) return;
    plan_.regions.resize(situation_.world);
    for (std::size_t site = 0; site < sites_.size(); ++site)
      for (const std::uint32_t rank : sites_[site]) plan_.regions[rank] = region[site];
    candidates_.push_back(
        {wire::ScheduleKind::regional, equal, {Flow::Way::regional, {}, owned_by(sites_, equal)}});
  }

  // The plan's hash and size should not depend on what no class of it uses.
  void drop_regions() {
    if (std::none_of(plan_.classes.begin(), plan_.classes.end(),
                     [](const auto& size) { return size.kind == wire::ScheduleKind::regional; }))
      plan_.regions.clear();
  }

  [[nodiscard]] bool has_direct() const { return ring_ > 0; }
  // With the best shares.
  [[nodiscard]] std::optional<std::size_t> best_direct() const {
    return ring_ == 3 ? std::optional<std::size_t>(2) : std::nullopt;
  }

  // For comparisons. One owner of all that is large is the most uneven of all.
  [[nodiscard]] double careful_time(std::size_t candidate, std::uint64_t bytes) const {
    const double seconds = time(candidates_[candidate], bytes);
    if (best_direct() == candidate) return seconds * kUnsure;
    const bool one_owner =
        has_direct() && candidate == 0 && bytes > situation_.thresholds.direct_bytes;
    return seconds * (one_owner ? kUnsure * kClose : 1);
  }

  // What the plan without measurements would do at this size.
  [[nodiscard]] std::size_t usual(std::uint64_t bytes) const {
    if (!has_direct() || bytes > situation_.thresholds.direct_bytes) return ring_;
    return bytes <= situation_.thresholds.single_owner_bytes ? 0 : 1;
  }

  [[nodiscard]] std::size_t best(std::uint64_t bytes) const {
    std::size_t least = 0;
    for (std::size_t i = 1; i < candidates_.size(); ++i) {
      if (careful_time(i, bytes) < careful_time(least, bytes)) least = i;
    }
    const std::size_t as_ever = usual(bytes);
    const bool close =
        time(candidates_[as_ever], bytes) <= kClose * time(candidates_[least], bytes);
    return close ? as_ever : least;
  }

  void pick() {
    plan_.classes.clear();
    std::uint64_t size = std::max<std::uint64_t>(situation_.thresholds.single_owner_bytes / 4, 1);
    for (; size <= kLargestStep; size *= 2) {
      const std::size_t now = best(size);
      if (!picked_.empty() && picked_.back().second == now) {
        plan_.classes.back().max_bytes = picked_.back().first = size;
        continue;
      }
      picked_.emplace_back(size, now);
      plan_.classes.push_back({size, candidates_[now].kind, candidates_[now].shares});
    }
    plan_.classes.back().max_bytes = kAnySize;
    serve_all_owners();
    keep_balanced_direct();
  }

  [[nodiscard]] bool works(std::size_t candidate) const {
    return std::isfinite(time(candidates_[candidate], kLargestStep));
  }

  // A class for no size at all, before the last one.
  void add_unsized(std::size_t candidate) {
    const std::size_t classes = plan_.classes.size();
    const std::uint64_t none = classes > 1 ? plan_.classes[classes - 2].max_bytes : 0;
    plan_.classes.insert(plan_.classes.end() - 1,
                         {none, candidates_[candidate].kind, candidates_[candidate].shares});
  }

  // Halves of an all-reduce need a schedule in which everybody owns something: see all_owning.
  void serve_all_owners() {
    if (std::all_of(plan_.classes.begin(), plan_.classes.end(),
                    [&](const auto& size) { return owned_by_all(all_owning(plan_, size)); }))
      return;
    add_unsized(has_direct() && works(1) ? 1 : ring_);
  }

  // Operations whose partial results are wide, or whose elements are coded, run the last direct
  // class there is (see size_class). It should not leave everything to one rank.
  void keep_balanced_direct() {
    const auto is_around = [](const auto& size) { return around(size.kind); };
    if (!has_direct() || std::none_of(plan_.classes.begin(), plan_.classes.end(), is_around))
      return;
    const std::optional<std::size_t> uneven = best_direct();
    const std::size_t best_balanced =
        uneven && careful_time(*uneven, kLargestStep) < careful_time(1, kLargestStep) ? *uneven : 1;
    if (!works(best_balanced)) return;
    const auto last =
        std::find_if(plan_.classes.rbegin(), plan_.classes.rend(),
                     [](const auto& size) { return way_of(size.kind) == Flow::Way::straight; });
    if (last == plan_.classes.rend() || last->shares == candidates_[0].shares)
      add_unsized(best_balanced);
  }

  [[nodiscard]] std::string why() const {
    std::string text;
    for (std::size_t i = 0; i < picked_.size(); ++i) {
      if (i > 0) text += "; above " + size_text(picked_[i - 1].first) + " ";
      text += described(candidates_[picked_[i].second], plan_.order);
    }
    constexpr std::array<std::uint64_t, 2> kShown = {64 << 10, 256 << 20};
    for (const std::uint64_t size : kShown) {
      const std::size_t chosen = best(size);
      text += "; " + size_text(size) + " takes " + duration(time(candidates_[chosen], size));
      std::string others;
      for (std::size_t i = 0; i < candidates_.size(); ++i) {
        if (i == chosen) continue;
        // Equal shares and the best ones may be the same.
        if (candidates_[i].kind == candidates_[chosen].kind &&
            candidates_[i].shares == candidates_[chosen].shares)
          continue;
        if (best_direct() == i && candidates_[i].shares == candidates_[1].shares) continue;
        others += (others.empty() ? " (" : ", ") + described(candidates_[i], plan_.order) + ": " +
                  duration(time(candidates_[i], size));
      }
      if (!others.empty()) text += others + ")";
      if (size == kShown.back() && net_.size() <= 16) {
        const double ratio = time(candidates_[chosen], size) / lower_bound(net_, size);
        std::array<char, 32> number{};
        std::snprintf(number.data(), number.size(), "%.2f", ratio);
        text += std::string(", ") + number.data() + " times the lower bound";
      }
    }
    return text;
  }

  const Situation& situation_;
  const wire::Plan& plain_;
  Sites sites_;
  bool crowded_;
  std::set<Edge> avoid_;
  Terrain terrain_;
  const Network& net_;
  wire::Plan plan_;
  std::vector<Candidate> candidates_;
  std::size_t ring_ = 0;                                       // the place of the ring among these
  std::vector<std::pair<std::uint64_t, std::size_t>> picked_;  // up to so many bytes, which
};

}  // namespace

std::optional<Choice> choose(const Situation& situation) {
  const std::optional<wire::Plan> plain =
      make_plan(situation.world, situation.segment_bytes, situation.unusable, situation.hosts,
                situation.thresholds);
  if (!plain) return std::nullopt;
  const Choice as_ever{*plain, {}};
  const std::size_t n = situation.world;
  if (n < 2 || situation.rates.hosts.size() != n || situation.rates.links.size() != n * n)
    return as_ever;
  std::vector<std::uint32_t> ranks(n);
  std::iota(ranks.begin(), ranks.end(), 0U);
  const Sites together = by_host(ranks, situation.hosts);
  if (together.size() < 2) return as_ever;  // nothing of it goes over a network
  const bool several = std::any_of(together.begin(), together.end(),
                                   [](const auto& there) { return there.size() > 1; });
  const bool crowded = several && between_hosts(plain->classes.back().kind);
  const Sites sites = crowded ? together : each_alone(ranks);
  std::set<Edge> avoid = unreachable(situation.rates);
  avoid.insert(situation.unusable.begin(), situation.unusable.end());
  if (auto choice = Chooser(situation, *plain, sites, crowded, avoid).run()) return choice;
  if (avoid == situation.unusable) return as_ever;
  if (auto without = make_plan(situation.world, situation.segment_bytes, avoid, situation.hosts,
                               situation.thresholds))
    return Choice{std::move(*without), "no ring avoids all pairs that could not connect"};
  // Connections that were tried once in vain may come about yet.
  Situation hopeful = situation;
  for (wire::LinkRate& link : hopeful.rates.links) link.unreachable = false;
  const char* const why = "no order avoids all pairs that could not connect";
  if (auto choice = Chooser(hopeful, *plain, sites, crowded, situation.unusable).run()) {
    choice->why += std::string("; ") + why;
    return choice;
  }
  return Choice{*plain, why};
}

double predict(const wire::Plan& plan, const wire::RateTable& rates, std::uint64_t bytes) {
  const wire::SizeClass& size = size_class(plan, bytes, false);
  const bool regional = size.kind == wire::ScheduleKind::regional;
  const Places there = places(plan);
  const Sites sites = regional                   ? there.hosts
                      : between_hosts(size.kind) ? by_host(plan.order, plan.hosts)
                                                 : each_alone(plan.order);
  Flow flow{way_of(size.kind), {}, {}};
  flow.order.resize(sites.size());
  std::iota(flow.order.begin(), flow.order.end(), 0U);
  flow.owned = size.kind == wire::ScheduleKind::ring
                   ? owned_by(sites, std::vector<std::uint32_t>(plan.order.size(), 1))
                   : owned_by(sites, size.shares);
  Terrain terrain(network(rates, sites));
  if (regional) terrain.divide(there.region_of);
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
