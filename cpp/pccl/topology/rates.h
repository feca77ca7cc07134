// Measured rates between members, and the network model that planning derives from them. Pure
// functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/topology/plan.h"
#include "pccl/wire/records.h"

namespace pccl::topology {

// Larger groups have no table: it has one entry per pair of members and is sent with every epoch.
inline constexpr std::size_t kMaxTable = 64;

// The table for the members `now`, by rank. Keeps the known rates of pairs that were members
// `before`. Empty when nothing is known.
[[nodiscard]] wire::RateTable carried(const wire::RateTable& table, std::span<const PeerId> before,
                                      std::span<const PeerId> now);

// Enters a member's row into the table of `members`, replacing what it measured. Ignores links to
// itself and to peers that are not members. REQUIRES: rank < members.size().
void merge(wire::RateTable& table, std::span<const PeerId> members, std::size_t rank,
           const wire::Measurements& row);

// Enters the round trips of a row where none is known. REQUIRES: as merge().
void introduce(wire::RateTable& table, std::span<const PeerId> members, std::size_t rank,
               const wire::Measurements& row);

// Whether the table has the delay of each pair of hosts, from some of their ranks. `hosts`: by
// rank. Pairs of ranks that could not connect are not needed. In groups with more hosts than have
// links to all others (Thresholds::mesh) it never has them.
[[nodiscard]] bool knows_delays(const wire::RateTable& table, std::span<const std::uint32_t> hosts,
                                const std::set<Edge>& unusable);

// The pairs that could not connect.
[[nodiscard]] std::set<Edge> unreachable(const wire::RateTable& table);

// A network of sites, without unknown values, in bytes per second and seconds. A site is a host, or
// a rank where every host has one rank.
struct Network {
  std::vector<double> up;     // all flows out of a site together
  std::vector<double> down;   // all flows into it
  std::vector<double> path;   // [from * n + to]: one pair alone; 0: unusable
  std::vector<double> delay;  // [from * n + to]: one way
  // [from * n + to]: rate of the pair while all other pairs are busy; 0: unknown.
  std::vector<double> together;
  bool guessed = false;  // no rate is known, so all are the same
  [[nodiscard]] std::size_t size() const { return up.size(); }
  [[nodiscard]] double path_of(std::size_t from, std::size_t to) const {
    return path[from * size() + to];
  }
  [[nodiscard]] double delay_of(std::size_t from, std::size_t to) const {
    return delay[from * size() + to];
  }
  // The rate of a pair on an idle network: limited by its path and its sites' links.
  [[nodiscard]] double rate_of(std::size_t from, std::size_t to) const;
};

// The network of `sites` (ranks by site) according to the table. A site's up-link carries at least
// what its flows carried together and what one flow carried alone; if only the latter is known, one
// flow is assumed to fill the link. Ranks of a site share its links and measure at the same time,
// so their rates are added. Unknown values are estimated: a pair from its sites' links, a site from
// the median of the others. A link is used in both directions, so a pair is unusable when it is in
// `unusable` or could not connect in either direction. REQUIRES: the table has all ranks of
// `sites`, or is empty.
[[nodiscard]] Network network(const wire::RateTable& table,
                              const std::vector<std::vector<std::uint32_t>>& sites,
                              const std::set<Edge>& unusable = {});

// Gives a network whose rates are guessed those of several sites: a host has eight times the rate
// of the line between two sites, which their hosts share. Does nothing if a rate is known, or if
// some region is not a site: its hosts are within 5 ms there and back, and all others are not.
void guess_lines(Network& network, std::span<const std::uint32_t> region);

// The ring of sites whose slowest pair of neighbours is fastest, and among these the one with the
// least sum of delays. Rates that differ by less than 5 % count as equal: measurements differ as
// much. Exact for up to kExactRing sites (Held & Karp 1962, on the pairs that are fast enough);
// beyond, 2-opt and or-opt from several starts. The result begins with site 0 and is the same on
// all machines. Empty: no ring avoids the unusable pairs, or for many sites none was found.
inline constexpr std::size_t kExactRing = 12;
[[nodiscard]] std::optional<std::vector<std::uint32_t>> best_ring(const Network& network);

// The share of each site for which `direct` takes the least time. Per byte of the array, a site
// with share s sends 1 - s of its contributions and (n - 1) s of results, and receives as much; a
// pair carries the sum of its ends' shares in each direction. With t seconds per byte:
//
//   minimise t:  1 + (n - 2) s[i] <= t min(up[i], down[i]),  s[i] + s[j] <= t path,  sum s = 1.
//
// If only the sites' own links bind, the solution has a closed form: each site uses its whole link,
// and a slow site that needs its link for its own contributions and the results owns nothing; if
// also up = down, the time equals lower_bound. Otherwise a dense simplex solves it. The shares add
// up to 1. Empty: no site reaches all others.
[[nodiscard]] std::optional<std::vector<double>> best_shares(const Network& network);

}  // namespace pccl::topology
