// What is known of the network between members, and what planning computes with. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/topology/plan.h"
#include "pccl/wire/records.h"

namespace pccl::topology {

// Larger groups have no table: it grows with the square of the members, and travels with every
// epoch.
inline constexpr std::size_t kMaxTable = 64;

// The table for `now`, who may be others than those it was made for, in ranks: what was known of
// pairs that are still there. Empty when nothing is known of anybody.
[[nodiscard]] wire::RateTable carried(const wire::RateTable& table, std::span<const PeerId> before,
                                      std::span<const PeerId> now);

// A member's row put into the table of `members`: what it measured replaces what was known. Links
// to others than members, and to itself, are passed over. REQUIRES: rank < members.size().
void merge(wire::RateTable& table, std::span<const PeerId> members, std::size_t rank,
           const wire::Measurements& row);

// The pairs that were tried in vain.
[[nodiscard]] std::set<Edge> unreachable(const wire::RateTable& table);

// A network of sites as planning sees it: every number is known. A site is a host, or a rank where
// hosts have one each. Bytes per second and seconds.
struct Network {
  std::vector<double> up;     // all flows out of a site together
  std::vector<double> down;   // all flows into it
  std::vector<double> path;   // [from * n + to]: one pair alone; 0: cannot be used
  std::vector<double> delay;  // [from * n + to]: one way
  // [from * n + to]: what the pair is known to carry at the same time as all others; 0: not known.
  std::vector<double> together;
  [[nodiscard]] std::size_t size() const { return up.size(); }
  [[nodiscard]] double path_of(std::size_t from, std::size_t to) const {
    return path[from * size() + to];
  }
  [[nodiscard]] double delay_of(std::size_t from, std::size_t to) const {
    return delay[from * size() + to];
  }
  // What a pair may carry while nothing else goes on: its path, and the two links it shares.
  [[nodiscard]] double rate_of(std::size_t from, std::size_t to) const;
};

// The table as a network of `sites`, ranks by site. A site's up-link carries at least what its
// flows carried together, and what one of them carried alone; where the first was not measured, one
// flow is taken to fill it. Ranks of one site share its links, and measure at the same time: what
// they carried is added up. What is not known is guessed from what is: a pair from its sites'
// links, a site from the median of the others. A link is used both ways, so a pair tried in vain
// either way, or in `unusable`, is not used. REQUIRES: the table has all ranks of `sites`, or is
// empty.
[[nodiscard]] Network network(const wire::RateTable& table,
                              const std::vector<std::vector<std::uint32_t>>& sites,
                              const std::set<Edge>& unusable = {});

// A ring of sites: the slowest pair of neighbours as fast as can be, then the sum of delays as
// small as can be. Rates that differ by less than 5 % count as equal, for measurements differ by as
// much. Exact for up to kExactRing sites (Held & Karp 1962, over the pairs that are fast enough);
// above, exchanges of edges and moves of runs from several starts. Begins with site 0, and is the
// same wherever it is computed. Nothing when no ring avoids the pairs that cannot be used, or, of
// many sites, when none was found.
inline constexpr std::size_t kExactRing = 12;
[[nodiscard]] std::optional<std::vector<std::uint32_t>> best_ring(const Network& network);

// How much each site should own so that `direct` takes least. Per byte of the array a site that
// owns the share s sends 1 - s of its contributions and (n - 1) s of results, and receives as much;
// a pair carries the sum of its ends' shares each way. So with t seconds per byte
//
//   minimise t:  1 + (n - 2) s[i] <= t min(up[i], down[i]),  s[i] + s[j] <= t path,  sum s = 1.
//
// Where only the sites' own links bind, the answer is closed: each uses what it has, and one that
// needs all its link for its own contributions and the results (a slow one) owns nothing; if then
// up = down, the time is the lower bound (see lower_bound). Else a dense simplex solves it. Nothing
// when no site reaches all others. The shares add up to 1.
[[nodiscard]] std::optional<std::vector<double>> best_shares(const Network& network);

}  // namespace pccl::topology
