// The shares of `direct`: see best_shares in rates.h.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "pccl/topology/rates.h"

namespace pccl::topology {
namespace {

constexpr double kSlack = 1e-9;  // relative

// What a site's links carry both ways, and what they may.
double capacity(const Network& network, std::size_t site) {
  return std::min(network.up[site], network.down[site]);
}

double pair_capacity(const Network& network, std::size_t a, std::size_t b) {
  return std::min(network.path_of(a, b), network.path_of(b, a));
}

// Seconds per byte that these shares take.
double time_of(const Network& network, const std::vector<double>& shares) {
  const std::size_t n = shares.size();
  double time = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double load = 1 + (static_cast<double>(n) - 2) * shares[i];
    time = std::max(time, load / capacity(network, i));
    for (std::size_t j = 0; j < i; ++j) {
      const double both = shares[i] + shares[j];
      if (both > 0) time = std::max(time, both / pair_capacity(network, i, j));
    }
  }
  return time;
}

// The shares where only the sites' own links count. For n > 2 a site that works for t seconds per
// byte can own (t c - 1) / (n - 2); the t at which that adds up to 1 is between the break points of
// sites that own nothing. Slow sites may need more than t: they own nothing, and the others stay
// balanced among themselves.
std::vector<double> by_own_links(const Network& network) {
  const std::size_t n = network.size();
  std::vector<double> shares(n, 1.0 / static_cast<double>(n));
  if (n <= 2) return shares;
  std::vector<std::size_t> fastest(n);
  std::iota(fastest.begin(), fastest.end(), std::size_t{0});
  std::stable_sort(fastest.begin(), fastest.end(), [&](std::size_t a, std::size_t b) {
    return capacity(network, a) > capacity(network, b);
  });
  const double spread = static_cast<double>(n) - 2;
  double sum = 0;
  double t = 0;
  for (std::size_t owners = 1; owners <= n; ++owners) {
    const double c = capacity(network, fastest[owners - 1]);
    // This one would own nothing at the time that those before it take.
    if (owners > 1 && t * c <= 1) break;
    sum += c;
    t = (spread + static_cast<double>(owners)) / sum;
  }
  double total = 0;
  for (std::size_t i = 0; i < n; ++i) {
    shares[i] = std::max(0.0, (t * capacity(network, i) - 1) / spread);
    total += shares[i];
  }
  for (double& share : shares) share /= total;
  return shares;
}

// Maximise the sum of x >= 0 under rows[k] x <= limit[k], all limits >= 0 and all coefficients >=
// 0, by the simplex method on a dense tableau; Bland's rule against going in circles, and a bound
// in case that rounding makes it do so: what it has then is within the limits all the same.
// `first`: the variable with which ties are broken first.
std::vector<double> maximise_sum(std::vector<std::vector<double>> rows, std::vector<double> limit,
                                 std::size_t first) {
  const std::size_t n = rows.empty() ? 0 : rows.front().size();
  std::vector<double> gain(n, 1);  // of each column's variable, by unit
  // Columns stand for variables that are 0, rows for those that are not. Numbers below n are x, the
  // others the slack of a row.
  std::vector<std::size_t> column(n);
  std::iota(column.begin(), column.end(), std::size_t{0});
  std::vector<std::size_t> row(rows.size());
  std::iota(row.begin(), row.end(), n);
  const auto turn = [&](std::size_t variable) {
    return variable < n ? (variable + n - first) % n : variable;
  };
  for (int pivots = 0; pivots < 1000; ++pivots) {
    std::size_t in = n;
    for (std::size_t j = 0; j < n; ++j) {
      if (gain[j] > kSlack && (in == n || turn(column[j]) < turn(column[in]))) in = j;
    }
    if (in == n) break;
    std::size_t out = rows.size();
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t k = 0; k < rows.size(); ++k) {
      if (rows[k][in] <= kSlack) continue;
      const double ratio = limit[k] / rows[k][in];
      if (out == rows.size() || ratio < least ||
          (ratio <= least && turn(row[k]) < turn(row[out]))) {
        out = k;
        least = ratio;
      }
    }
    if (out == rows.size()) break;  // without bound: every site has a limit, so not here
    std::vector<double>& pivot = rows[out];
    const double by = 1 / pivot[in];
    for (double& value : pivot) value *= by;
    pivot[in] = by;
    limit[out] *= by;
    for (std::size_t k = 0; k < rows.size(); ++k) {
      const double factor = rows[k][in];
      if (k == out || factor == 0) continue;
      for (std::size_t j = 0; j < n; ++j) rows[k][j] -= factor * pivot[j];
      rows[k][in] = -factor * by;
      limit[k] = std::max(0.0, limit[k] - factor * limit[out]);
    }
    const double factor = gain[in];
    for (std::size_t j = 0; j < n; ++j) gain[j] -= factor * pivot[j];
    gain[in] = -factor * by;
    std::swap(column[in], row[out]);
  }
  std::vector<double> x(n, 0);
  for (std::size_t k = 0; k < row.size(); ++k) {
    if (row[k] < n) x[row[k]] = limit[k];
  }
  return x;
}

// The general case. With x = s / t the programme is: maximise 1 / t = sum x under sum x + (n - 2)
// x[i] <= c[i] and x[i] + x[j] <= path.
std::optional<std::vector<double>> by_simplex(const Network& network) {
  const std::size_t n = network.size();
  double scale = 0;
  for (std::size_t i = 0; i < n; ++i) scale = std::max(scale, capacity(network, i));
  std::vector<std::vector<double>> rows;
  std::vector<double> limit;
  for (std::size_t i = 0; i < n; ++i) {
    std::vector<double>& row = rows.emplace_back(n, 1.0);
    row[i] = static_cast<double>(n) - 1;
    limit.push_back(capacity(network, i) / scale);
    for (std::size_t j = 0; j < i; ++j) {
      // What the sites' own limits imply need not be said.
      const double pair = pair_capacity(network, i, j) / scale;
      if (pair >= (capacity(network, i) + capacity(network, j)) / scale) continue;
      std::vector<double>& both = rows.emplace_back(n, 0.0);
      both[i] = both[j] = 1;
      limit.push_back(pair);
    }
  }
  // Mostly many shares are equally good, and each solution is a corner of them. The mean over
  // several is as good, and spreads the work.
  std::vector<std::vector<double>> solutions;
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t first = 0; first < n; ++first) {
    std::vector<double> shares = maximise_sum(rows, limit, first);
    const double total = std::accumulate(shares.begin(), shares.end(), 0.0);
    if (!(total > kSlack)) continue;
    for (double& share : shares) share = share / total < kSlack ? 0 : share / total;
    least = std::min(least, time_of(network, shares));
    solutions.push_back(std::move(shares));
  }
  if (!std::isfinite(least)) return std::nullopt;
  std::vector<double> mean(n, 0);
  for (const std::vector<double>& shares : solutions) {
    // A solution that rounding has spoilt is not part of it.
    if (time_of(network, shares) > least * (1 + 1e-6)) continue;
    for (std::size_t i = 0; i < n; ++i) mean[i] += shares[i];
  }
  const double total = std::accumulate(mean.begin(), mean.end(), 0.0);
  for (double& share : mean) share /= total;
  return mean;
}

}  // namespace

std::optional<std::vector<double>> best_shares(const Network& network) {
  const std::size_t n = network.size();
  if (n == 0) return std::nullopt;
  if (n == 1) return std::vector<double>{1};
  std::vector<double> shares = by_own_links(network);
  double own = 0;
  for (std::size_t i = 0; i < n; ++i)
    own = std::max(own, (1 + (static_cast<double>(n) - 2) * shares[i]) / capacity(network, i));
  // Best without the pairs' limits, and within them.
  if (time_of(network, shares) <= own * (1 + kSlack)) return shares;
  return by_simplex(network);
}

}  // namespace pccl::topology
