#include "pccl/topology/choose.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "pccl/topology/predict.h"

namespace pccl::topology {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Predictions within this factor count as equal.
constexpr double kClose = 1.03;
// Rates measured within a second differ by about this factor, even where all links are alike.
// Uneven shares must promise a larger gain, and so must any plan where rates are only guessed.
constexpr double kUnsure = 1.25;
// Shares are rounded to multiples of 1 / kShareUnits of the array.
constexpr std::uint32_t kShareUnits = 1 << 16;
// The largest size that is considered. Larger ones are treated alike.
constexpr std::uint64_t kLargestStep = std::uint64_t{1} << 32;

// A possible size class, before its sizes are known.
struct Candidate {
  wire::ScheduleKind kind = wire::ScheduleKind::ring;
  std::vector<std::uint32_t> shares;  // by rank
  Flow flow;
};

// The shares of ranks for the fractions that sites own: the ranks of a site own equal parts.
// Rounded by largest remainders, so that the sum is exact. Equal shares are ones, as they are
// without a table.
std::vector<std::uint32_t> as_shares(const HostRanks& sites, std::vector<double> owned,
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
  if (std::ranges::all_of(exact, [&](double share) { return std::abs(share * world - 1) < 0.01; }))
    return std::vector<std::uint32_t>(world, 1);
  std::vector<std::uint32_t> shares(world);
  std::vector<std::uint32_t> by_rest(world);
  std::iota(by_rest.begin(), by_rest.end(), 0U);
  std::uint32_t given = 0;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    exact[rank] *= kShareUnits;
    shares[rank] = static_cast<std::uint32_t>(exact[rank]);
    given += shares[rank];
  }
  std::ranges::stable_sort(by_rest, std::greater<>(),
                           [&](std::uint32_t rank) { return exact[rank] - shares[rank]; });
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

std::string described(const Candidate& candidate, const std::vector<std::uint32_t>& order) {
  constexpr std::array kNames = {"ring", "direct", "ring of hosts", "direct between hosts",
                                 "by regions"};
  static_assert(kNames.size() == enum_count(wire::ScheduleKind{}));
  const std::string text = kNames[static_cast<std::size_t>(candidate.kind)];
  if (candidate.flow.way == Flow::Way::around) return text + " " + list(order, "-");
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

// The segment size: at most 20 ms on one of the 16 connections of the slowest link. Segments are
// sent in parallel, one on each connection. A segment is combined and sent on only as a whole, and
// in the end all sites wait for the slowest connection.
std::uint32_t segment_for(const Network& network, std::uint32_t most) {
  constexpr double kLongest = 0.02 / 16;
  constexpr std::uint32_t kLeast = 64 << 10;
  double slowest = kInfinity;
  for (std::size_t site = 0; site < network.size(); ++site)
    slowest = std::min({slowest, network.up[site], network.down[site]});
  std::uint32_t bytes = kLeast;
  while (bytes < most && 2.0 * bytes <= slowest * kLongest) bytes *= 2;
  return std::min(bytes, most);
}

// Implements choose() for several sites.
class Chooser {
 public:
  Chooser(const Situation& situation, const wire::Plan& plain, HostRanks sites, bool crowded,
          std::set<Edge> avoid)
      : situation_(situation),
        plain_(plain),
        sites_(std::move(sites)),
        crowded_(crowded),
        avoid_(std::move(avoid)),
        terrain_(network(situation.rates, sites_, avoid_)),
        net_(terrain_.net) {}

  // Empty: no schedule avoids the pairs in `avoid`.
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
    if (!avoids(plan_, avoid_)) return std::nullopt;
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

  void add_regional(const std::vector<std::uint32_t>& shares,
                    const std::vector<std::uint32_t>& regions) {
    candidates_.push_back({wire::ScheduleKind::regional,
                           shares,
                           {Flow::Way::regional, {}, owned_by(sites_, shares), regions}});
  }

  // The owner of small arrays: the first site, unless another one is clearly nearer to all.
  // `regions`: empty, or they reduce first.
  [[nodiscard]] std::vector<std::uint32_t> single_owner(
      const std::vector<std::uint32_t>& regions) const {
    const Flow::Way way = regions.empty() ? Flow::Way::straight : Flow::Way::regional;
    std::vector<std::uint32_t> best;
    double least = kInfinity;
    for (const auto& ranks : sites_) {
      std::vector<std::uint32_t> shares(situation_.world, 0);
      shares[ranks.front()] = 1;
      const Flow flow{way, {}, owned_by(sites_, shares), regions};
      const double time =
          seconds(terrain_, flow, situation_.thresholds.single_owner_bytes, plan_.segment_bytes);
      if (!best.empty() && time * kClose >= least) continue;
      least = time;
      best = std::move(shares);
    }
    return best;
  }

  // Collects the candidates in the order in which the plan without measurements uses them, by size.
  void gather(const std::vector<std::uint32_t>& order) {
    const std::vector<std::uint32_t> equal(situation_.world, 1);
    const bool mesh = sites_.size() <= situation_.thresholds.mesh;
    const std::vector<std::uint32_t> regions = mesh ? own_regions() : usable_regions(order);
    if (mesh) {
      add_direct(single_owner({}));
      add_direct(equal);
      if (const auto owned = best_shares(net_))
        add_direct(as_shares(sites_, *owned, situation_.world));
    } else if (!regions.empty()) {
      add_regional(single_owner(regions), regions);
      add_regional(equal, regions);
    }
    const auto kind = crowded_ ? wire::ScheduleKind::host_ring : wire::ScheduleKind::ring;
    ring_ = candidates_.size();
    candidates_.push_back({kind, equal, {Flow::Way::around, order, owned_by(sites_, equal)}});
    if (mesh && !regions.empty()) add_regional(equal, regions);
    if (regions.empty()) return;
    plan_.regions.resize(situation_.world);
    for (std::size_t site = 0; site < sites_.size(); ++site)
      for (const std::uint32_t rank : sites_[site]) plan_.regions[rank] = regions[site];
  }

  // The network's regions, by site; empty: it has none, or one has too many sites.
  [[nodiscard]] std::vector<std::uint32_t> own_regions() const {
    if (!terrain_.regions || !sites_are_hosts()) return {};
    const std::vector<std::uint32_t>& region = *terrain_.regions;
    for (const std::uint32_t one : region)
      if (std::ranges::count(region, one) > std::ptrdiff_t{kMaxMesh}) return {};
    return region;
  }

  // For more sites than have links to all others: the same if they are few and all pairs that they
  // need are usable. Else neighbours in the ring, with borders where those pairs are usable, or at
  // least those of a single owner.
  [[nodiscard]] std::vector<std::uint32_t> usable_regions(
      const std::vector<std::uint32_t>& order) const {
    if (!sites_are_hosts()) return {};
    const std::vector<std::uint32_t> equal(situation_.world, 1);
    const std::vector<std::uint32_t> own = own_regions();
    if (!own.empty() && 1 + std::ranges::max(own) <= kMaxMesh / 2 && pairs_work(own, equal))
      return own;
    const std::vector<std::uint32_t> even = even_regions(sites_.size());
    const auto turns = static_cast<std::size_t>(std::ranges::count(even, 0U));
    std::vector<std::uint32_t> regions(sites_.size());
    for (const bool single : {false, true}) {
      for (std::size_t turn = 0; turn < turns; ++turn) {
        for (std::size_t at = 0; at < order.size(); ++at)
          regions[order[at]] = even[(at + turn) % order.size()];
        if (pairs_work(regions, single ? single_owner(regions) : equal)) return regions;
      }
    }
    return {};
  }

  // Whether every pair that these owners need is usable.
  [[nodiscard]] bool pairs_work(const std::vector<std::uint32_t>& regions,
                                const std::vector<std::uint32_t>& shares) const {
    const Flow flow{Flow::Way::regional, {}, owned_by(sites_, shares), regions};
    return std::isfinite(seconds(terrain_, flow, kLargestStep, plan_.segment_bytes));
  }

  [[nodiscard]] bool sites_are_hosts() const {
    return by_host(plan_.order, plan_.hosts).size() == sites_.size();
  }

  // The plan's hash and size should not depend on regions that no class uses.
  void drop_regions() {
    if (std::ranges::find(plan_.classes, wire::ScheduleKind::regional, &wire::SizeClass::kind) ==
        plan_.classes.end())
      plan_.regions.clear();
  }

  // Whether there are candidates for small arrays: the first one has a single owner, the second one
  // equal shares.
  [[nodiscard]] bool has_short() const { return ring_ > 0; }
  [[nodiscard]] std::uint64_t short_bytes() const {
    return situation_.thresholds.short_bytes(sites_.size());
  }
  // The direct candidate with the best shares.
  [[nodiscard]] std::optional<std::size_t> best_direct() const {
    return ring_ == 3 ? std::optional<std::size_t>(2) : std::nullopt;
  }

  // The time for comparisons, with a margin for uneven shares. A single owner of a large array is
  // the most uneven candidate.
  [[nodiscard]] double careful_time(std::size_t candidate, std::uint64_t bytes) const {
    const double seconds = time(candidates_[candidate], bytes);
    if (best_direct() == candidate) return seconds * kUnsure;
    const bool one_owner = has_short() && candidate == 0 && bytes > short_bytes();
    return seconds * (one_owner ? kUnsure * kClose : 1);
  }

  // The candidate that the plan without measurements uses at this size.
  [[nodiscard]] std::size_t usual(std::uint64_t bytes) const {
    if (!has_short() || bytes > short_bytes()) return ring_;
    return bytes <= situation_.thresholds.single_owner_bytes ? 0 : 1;
  }

  [[nodiscard]] std::size_t best(std::uint64_t bytes) const {
    std::size_t least = 0;
    for (std::size_t i = 1; i < candidates_.size(); ++i) {
      if (careful_time(i, bytes) < careful_time(least, bytes)) least = i;
    }
    const std::size_t as_ever = usual(bytes);
    const double margin = net_.guessed ? kUnsure : kClose;
    const bool close =
        time(candidates_[as_ever], bytes) <= margin * time(candidates_[least], bytes);
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
    keep_balanced();
  }

  [[nodiscard]] bool works(std::size_t candidate) const {
    return std::isfinite(time(candidates_[candidate], kLargestStep));
  }

  // Adds a class that no size selects, before the last one.
  void add_unsized(std::size_t candidate) {
    const std::size_t classes = plan_.classes.size();
    const std::uint64_t none = classes > 1 ? plan_.classes[classes - 2].max_bytes : 0;
    plan_.classes.insert(plan_.classes.end() - 1,
                         {none, candidates_[candidate].kind, candidates_[candidate].shares});
  }

  // Halves of an all-reduce need a schedule in which every rank owns a part: see all_owning.
  void serve_all_owners() {
    if (std::ranges::all_of(
            plan_.classes, [&](const auto& size) { return owned_by_all(all_owning(plan_, size)); }))
      return;
    add_unsized(has_short() && works(1) ? 1 : ring_);
  }

  // Operations with wide partial results or coded elements run the last class of few hops (see
  // size_class). It should not leave everything to one rank.
  void keep_balanced() {
    const auto way = [](const wire::SizeClass& size) { return way_of(size.kind); };
    if (!has_short() ||
        std::ranges::find(plan_.classes, Flow::Way::around, way) == plan_.classes.end())
      return;
    const std::optional<std::size_t> uneven = best_direct();
    const std::size_t best_balanced =
        uneven && careful_time(*uneven, kLargestStep) < careful_time(1, kLargestStep) ? *uneven : 1;
    if (!works(best_balanced)) return;
    const auto last =
        std::find_if(plan_.classes.rbegin(), plan_.classes.rend(),
                     [&](const auto& size) { return way(size) == candidates_.front().flow.way; });
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
        // The best shares may be the equal ones.
        if (candidates_[i].kind == candidates_[chosen].kind &&
            candidates_[i].shares == candidates_[chosen].shares)
          continue;
        if (best_direct() == i && candidates_[i].shares == candidates_[1].shares) continue;
        others += (others.empty() ? " (" : ", ") + described(candidates_[i], plan_.order) + ": " +
                  duration(time(candidates_[i], size));
      }
      if (!others.empty()) text += others + ")";
      if (size == kShown.back() && net_.size() <= 16) {
        std::array<char, 32> ratio{};
        std::snprintf(ratio.data(), ratio.size(), "%.2f",
                      time(candidates_[chosen], size) / lower_bound(net_, size));
        text += std::string(", ") + ratio.data() + " times the lower bound";
      }
    }
    return text;
  }

  const Situation& situation_;
  const wire::Plan& plain_;
  HostRanks sites_;
  bool crowded_;
  std::set<Edge> avoid_;
  Terrain terrain_;
  const Network& net_;
  wire::Plan plan_;
  std::vector<Candidate> candidates_;
  std::size_t ring_ = 0;                                       // index of the ring's candidate
  std::vector<std::pair<std::uint64_t, std::size_t>> picked_;  // (largest size, candidate)
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
  const HostRanks together = by_host(ranks, situation.hosts);
  if (together.size() < 2) return as_ever;  // no network is used
  const bool several =
      std::ranges::any_of(together, [](const auto& there) { return there.size() > 1; });
  const bool crowded = several && between_hosts(plain->classes.back().kind);
  const HostRanks sites = crowded ? together : each_alone(ranks);
  std::set<Edge> avoid = unreachable(situation.rates);
  avoid.insert(situation.unusable.begin(), situation.unusable.end());
  if (auto choice = Chooser(situation, *plain, sites, crowded, avoid).run()) return choice;
  if (avoid == situation.unusable) return as_ever;
  if (auto without = make_plan(situation.world, situation.segment_bytes, avoid, situation.hosts,
                               situation.thresholds))
    return Choice{std::move(*without), "no ring avoids all pairs that could not connect"};
  // A connection that failed once may succeed later.
  Situation hopeful = situation;
  for (wire::LinkRate& link : hopeful.rates.links) link.unreachable = false;
  const char* const why = "no order avoids all pairs that could not connect";
  if (auto choice = Chooser(hopeful, *plain, sites, crowded, situation.unusable).run()) {
    choice->why += std::string("; ") + why;
    return choice;
  }
  return Choice{*plain, why};
}

}  // namespace pccl::topology
