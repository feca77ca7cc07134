#include "pccl/topology/rates.h"

#include <algorithm>
#include <map>

namespace pccl::topology {
namespace {

constexpr double kKilobyte = 1000;
// Assumed for all sites when no rate is known, or for the lines between sites: 100 Mbit/s. It
// decides how much delays weigh beside bytes, and that segments are small.
constexpr double kAssumedRate = 12.5e6;
// Hosts that are this near each other (one way) are at one site, in one network.
constexpr double kSite = 0.5e-6 * wire::kFarRoundTrip;
constexpr double kSiteRate = 8 * kAssumedRate;

double median_or(std::vector<double> values, double otherwise) {
  if (values.empty()) return otherwise;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Replaces zeros by the median of the other values, or by `otherwise`.
void guess(std::vector<double>& values, double otherwise) {
  std::vector<double> known;
  std::copy_if(values.begin(), values.end(), std::back_inserter(known),
               [](double value) { return value > 0; });
  const double middle = median_or(known, otherwise);
  std::replace(values.begin(), values.end(), 0.0, middle);
}

bool says_nothing(const wire::RateTable& table) {
  return std::ranges::count(table.hosts, wire::HostRate{}) == std::ssize(table.hosts) &&
         std::ranges::count(table.links, wire::LinkRate{}) == std::ssize(table.links);
}

// Recognises sites whose paths share the site's link about evenly: the rates of its paths add up to
// the rate of the link. Each such path alone could use the whole link, so its own rate is dropped.
void share_links(Network& net, const std::vector<bool>& usable) {
  constexpr double kAbout = 1.25;
  const std::size_t n = net.size();
  std::vector<std::size_t> shared;
  for (std::size_t a = 0; a < n; ++a) {
    for (const bool out : {true, false}) {
      const double link = out ? net.up[a] : net.down[a];
      double sum = 0;
      double fastest = 0;
      double slowest = link;
      std::vector<std::size_t> ways;
      bool all = true;
      for (std::size_t b = 0; b < n; ++b) {
        const std::size_t at = out ? a * n + b : b * n + a;
        if (a == b || !usable[at]) continue;
        ways.push_back(at);
        sum += net.path[at];
        fastest = std::max(fastest, net.path[at]);
        slowest = std::min(slowest, net.path[at]);
        all = all && net.path[at] > 0;
      }
      if (all && ways.size() > 1 && sum < kAbout * link && link < kAbout * sum &&
          fastest < 2 * slowest)
        shared.insert(shared.end(), ways.begin(), ways.end());
    }
  }
  for (const std::size_t at : shared) net.path[at] = 0;
}

}  // namespace

wire::RateTable carried(const wire::RateTable& table, std::span<const PeerId> before,
                        std::span<const PeerId> now) {
  const std::size_t n = now.size();
  const std::size_t m = before.size();
  if (n > kMaxTable || table.hosts.size() != m || table.links.size() != m * m) return {};
  std::map<PeerId, std::size_t> ranks;
  for (std::size_t rank = 0; rank < m; ++rank) ranks[before[rank]] = rank;
  wire::RateTable kept;
  kept.hosts.resize(n);
  kept.links.resize(n * n);
  for (std::size_t a = 0; a < n; ++a) {
    const auto from = ranks.find(now[a]);
    if (from == ranks.end()) continue;
    kept.hosts[a] = table.hosts[from->second];
    for (std::size_t b = 0; b < n; ++b) {
      const auto to = ranks.find(now[b]);
      if (to != ranks.end()) kept.links[a * n + b] = table.links[from->second * m + to->second];
    }
  }
  return says_nothing(kept) ? wire::RateTable{} : kept;
}

void merge(wire::RateTable& table, std::span<const PeerId> members, std::size_t rank,
           const wire::Measurements& row) {
  const std::size_t n = members.size();
  if (n > kMaxTable || row == wire::Measurements{}) return;
  if (table.hosts.size() != n || table.links.size() != n * n) {
    table.hosts.assign(n, {});
    table.links.assign(n * n, {});
  }
  if (row.total.up_kilobytes_per_s > 0)
    table.hosts[rank].up_kilobytes_per_s = row.total.up_kilobytes_per_s;
  if (row.total.down_kilobytes_per_s > 0)
    table.hosts[rank].down_kilobytes_per_s = row.total.down_kilobytes_per_s;
  for (const wire::MeasuredLink& measured : row.links) {
    const auto found = std::find(members.begin(), members.end(), measured.to);
    const auto to = static_cast<std::size_t>(found - members.begin());
    if (to == n || to == rank) continue;
    wire::LinkRate& link = table.links[rank * n + to];
    if (measured.rate.unreachable) {
      link = {true, 0, 0};
      continue;
    }
    if (measured.rate == wire::LinkRate{}) continue;
    // A row with a round-trip time is a new measurement of the path and replaces the old one.
    if (measured.rate.rtt_us > 0) {
      link = measured.rate;
      continue;
    }
    link.unreachable = false;
    if (measured.rate.kilobytes_per_s > 0) link.kilobytes_per_s = measured.rate.kilobytes_per_s;
    if (measured.rate.together_kilobytes_per_s > 0)
      link.together_kilobytes_per_s = measured.rate.together_kilobytes_per_s;
  }
  if (says_nothing(table)) table = {};
}

void introduce(wire::RateTable& table, std::span<const PeerId> members, std::size_t rank,
               const wire::Measurements& row) {
  const std::size_t n = members.size();
  if (n > kMaxTable) return;
  const bool empty = table.links.size() != n * n;
  wire::Measurements unknown;
  for (const wire::MeasuredLink& link : row.links) {
    const auto to = static_cast<std::size_t>(std::ranges::find(members, link.to) - members.begin());
    if (to < n && (empty || table.links[rank * n + to] == wire::LinkRate{}))
      unknown.links.push_back({link.to, {.rtt_us = link.rate.rtt_us}});
  }
  merge(table, members, rank, unknown);
}

bool knows_delays(const wire::RateTable& table, std::span<const std::uint32_t> hosts,
                  const std::set<Edge>& unusable) {
  const auto n = static_cast<std::uint32_t>(hosts.size());
  if (table.links.size() != std::size_t{n} * n) return false;
  // By two hosts, [larger * n + smaller].
  std::vector<bool> needed(std::size_t{n} * n);
  std::vector<bool> known(std::size_t{n} * n);
  for (std::uint32_t a = 0; a < n; ++a) {
    for (std::uint32_t b = 0; b < a; ++b) {
      if (hosts[a] == hosts[b]) continue;
      const wire::LinkRate& there = table.links[std::size_t{a} * n + b];
      const wire::LinkRate& back = table.links[std::size_t{b} * n + a];
      const auto [low, high] = std::minmax(hosts[a], hosts[b]);
      const std::size_t pair = std::size_t{high} * n + low;
      needed[pair] = true;
      if (there.rtt_us > 0 || back.rtt_us > 0 || there.unreachable || back.unreachable ||
          unusable.contains({b, a}))
        known[pair] = true;
    }
  }
  return needed == known;
}

std::set<Edge> unreachable(const wire::RateTable& table) {
  std::set<Edge> pairs;
  const auto n = static_cast<std::uint32_t>(table.hosts.size());
  if (table.links.size() != std::size_t{n} * n) return pairs;
  for (std::uint32_t a = 0; a < n; ++a) {
    for (std::uint32_t b = 0; b < n; ++b) {
      if (a != b && table.links[std::size_t{a} * n + b].unreachable)
        pairs.insert(std::minmax(a, b));
    }
  }
  return pairs;
}

double Network::rate_of(std::size_t from, std::size_t to) const {
  return std::min({up[from], down[to], path_of(from, to)});
}

Network network(const wire::RateTable& table, const std::vector<std::vector<std::uint32_t>>& sites,
                const std::set<Edge>& unusable) {
  const std::size_t n = sites.size();
  Network net;
  net.up.resize(n);
  net.down.resize(n);
  net.path.resize(n * n);
  net.delay.resize(n * n);
  net.together.resize(n * n);
  std::vector<double> out(n);  // rate of the fastest path; 0: unknown
  std::vector<double> in(n);
  std::vector<bool> usable(n * n, true);
  const std::size_t world = table.hosts.size();
  for (std::size_t a = 0; a < n; ++a) {
    for (const std::uint32_t rank : sites[a]) {
      if (rank >= world) continue;
      net.up[a] += kKilobyte * table.hosts[rank].up_kilobytes_per_s;
      net.down[a] += kKilobyte * table.hosts[rank].down_kilobytes_per_s;
    }
  }
  for (std::size_t a = 0; a < n; ++a) {
    for (const std::uint32_t from : sites[a]) {
      for (std::size_t b = 0; b < n; ++b) {
        if (a == b) continue;
        for (const std::uint32_t to : sites[b]) {
          const std::pair<std::uint32_t, std::uint32_t> pair = std::minmax(from, to);
          if (unusable.contains(pair)) usable[a * n + b] = usable[b * n + a] = false;
          if (from >= world || to >= world) continue;
          const wire::LinkRate& link = table.links[from * world + to];
          if (link.unreachable) usable[a * n + b] = usable[b * n + a] = false;
          const double rate = kKilobyte * link.kilobytes_per_s;
          net.path[a * n + b] = std::max(net.path[a * n + b], rate);
          net.together[a * n + b] += std::max(rate, kKilobyte * link.together_kilobytes_per_s);
          out[a] = std::max(out[a], rate);
          in[b] = std::max(in[b], rate);
          if (link.rtt_us == 0) continue;
          // The least delay seen in either direction: larger ones are due to queues.
          for (const std::size_t at : {a * n + b, b * n + a}) {
            const double delay = 0.5e-6 * link.rtt_us;
            net.delay[at] = net.delay[at] == 0 ? delay : std::min(net.delay[at], delay);
          }
        }
      }
    }
  }
  // If one direction of a site's link is known, assume the same for the other. The rate of a path
  // is only a lower bound for its sites' links, unless no link is known.
  for (std::size_t a = 0; a < n; ++a) {
    if (net.up[a] == 0) net.up[a] = net.down[a];
    if (net.down[a] == 0) net.down[a] = net.up[a];
  }
  const bool totals = std::any_of(net.up.begin(), net.up.end(), [](double up) { return up > 0; });
  for (std::size_t a = 0; a < n; ++a) {
    if (totals && net.up[a] == 0) continue;
    net.up[a] = std::max(net.up[a], totals ? out[a] : std::max(out[a], in[a]));
    net.down[a] = std::max(net.down[a], totals ? in[a] : std::max(out[a], in[a]));
  }
  net.guessed = !totals && std::ranges::all_of(out, [](double rate) { return rate == 0; });
  share_links(net, usable);
  guess(net.up, kAssumedRate);
  guess(net.down, kAssumedRate);
  for (std::size_t a = 0; a < n; ++a) {
    net.up[a] = std::max(net.up[a], out[a]);
    net.down[a] = std::max(net.down[a], in[a]);
  }
  std::vector<double> delays;
  std::copy_if(net.delay.begin(), net.delay.end(), std::back_inserter(delays),
               [](double delay) { return delay > 0; });
  const double delay = median_or(delays, 0);
  for (std::size_t a = 0; a < n; ++a) {
    for (std::size_t b = 0; b < n; ++b) {
      double& path = net.path[a * n + b];
      if (a == b || !usable[a * n + b]) {
        path = 0;
      } else if (path == 0) {
        path = std::min(net.up[a], net.down[b]);
      }
      if (a != b && net.delay[a * n + b] == 0) net.delay[a * n + b] = delay;
    }
  }
  return net;
}

void guess_lines(Network& network, std::span<const std::uint32_t> region) {
  const std::size_t n = network.size();
  if (!network.guessed) return;
  const auto inside = [&](std::size_t at) { return region[at / n] == region[at % n]; };
  for (std::size_t at = 0; at < n * n; ++at)
    if (network.path[at] > 0 && inside(at) != (network.delay[at] < kSite)) return;
  std::ranges::fill(network.up, kSiteRate);
  std::ranges::fill(network.down, kSiteRate);
  std::map<std::pair<std::uint32_t, std::uint32_t>, double> pairs;  // by regions
  for (std::size_t at = 0; at < n * n; ++at)
    if (network.path[at] > 0) ++pairs[{region[at / n], region[at % n]}];
  for (std::size_t at = 0; at < n * n; ++at) {
    if (network.path[at] <= 0) continue;
    network.path[at] = inside(at) ? kSiteRate : kAssumedRate;
    if (!inside(at)) network.together[at] = kAssumedRate / pairs[{region[at / n], region[at % n]}];
  }
}

}  // namespace pccl::topology
