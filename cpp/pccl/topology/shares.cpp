// The shares of `direct`: see best_shares in rates.h.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "pccl/topology/rates.h"

namespace pccl::topology {
namespace {

constexpr double kSlack = 1e-9;  // relative

// The rate of a site's link, or of a pair, in its slower direction.
double capacity(const Network& network, std::size_t site) {
  return std::min(network.up[site], network.down[site]);
}

double pair_capacity(const Network& network, std::size_t a, std::size_t b) {
  return std::min(network.path_of(a, b), network.path_of(b, a));
}

// Seconds per byte with these shares.
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

// The shares if only the sites' own links count. For n > 2, a site of capacity c that is busy for t
// seconds per byte can own (t c - 1) / (n - 2); t follows from their sum being 1. A slow site with
// t c < 1 owns nothing, and the others are balanced among themselves.
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
    // At the time t of the faster sites, this one would own nothing.
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

// Maximises the sum of x >= 0 under rows[k] x <= limit[k] by the simplex method on a dense tableau.
// Bland's rule prevents cycles. The number of pivots is bounded in case rounding causes a cycle;
// the result is feasible even then. `first`: the variable preferred on ties. REQUIRES: limits and
// coefficients >= 0.
std::vector<double> maximise_sum(std::vector<std::vector<double>> rows, std::vector<double> limit,
                                 std::size_t first) {
  const std::size_t n = rows.empty() ? 0 : rows.front().size();
  std::vector<double> gain(n, 1);  // of each column's variable, by unit
  // Columns are the variables that are 0, rows the others. Numbers below n are x, the others are
  // the slack of a row.
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
    if (out == rows.size()) break;  // unbounded: impossible, as every site has a limit
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
      // Omit limits that the sites' own limits imply.
      const double pair = pair_capacity(network, i, j) / scale;
      if (pair >= (capacity(network, i) + capacity(network, j)) / scale) continue;
      std::vector<double>& both = rows.emplace_back(n, 0.0);
      both[i] = both[j] = 1;
      limit.push_back(pair);
    }
  }
  // Usually many shares are equally good, and each solution is one corner of their set. The mean of
  // several solutions is as good, and spreads the work.
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
    // Leave out a solution that rounding has spoilt.
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
  // The optimum without the pairs' limits also satisfies them.
  if (time_of(network, shares) <= own * (1 + kSlack)) return shares;
  return by_simplex(network);
}

}  // namespace pccl::topology
