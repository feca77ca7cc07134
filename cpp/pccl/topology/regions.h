// Finds regions: sets of sites that are near each other. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pccl/topology/rates.h"

namespace pccl::topology {

// The number of each site's region. The delay between any two sites of a region is at most half of
// the delay to any other site. Returns the division with the fewest regions if there are several.
// Unusable pairs do not count. Empty: no division has several regions, one of them with several
// sites.
[[nodiscard]] std::optional<std::vector<std::uint32_t>> regions(const Network& network);

// The known capacity from one region to another, [from * regions + to] in bytes per second: the sum
// of the rates of pairs at the same time. An unknown pair is assumed to carry as much as the
// others; if no pair is known, only the sites' links limit the capacity.
[[nodiscard]] std::vector<double> between_regions(const Network& network,
                                                  const std::vector<std::uint32_t>& regions);

}  // namespace pccl::topology
