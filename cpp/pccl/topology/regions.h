// Which sites are near each other. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pccl/topology/rates.h"

namespace pccl::topology {

// The regions of a network's sites, a number for each: from every site of a region to every other
// one of it takes at most half as long as to any site elsewhere. Of several such divisions the one
// into the fewest regions. Pairs that cannot be used do not count. Nothing where there is none with
// several regions, one of them of several sites.
[[nodiscard]] std::optional<std::vector<std::uint32_t>> regions(const Network& network);

// What all flows from one region to another are known to carry together, [from * regions + to]
// bytes per second: the sum of what pairs did at the same time. A pair of which that is not known
// is taken to carry as much as the others; where it is known of none, the sites' own links bind.
[[nodiscard]] std::vector<double> between_regions(const Network& network,
                                                  const std::vector<std::uint32_t>& regions);

}  // namespace pccl::topology
