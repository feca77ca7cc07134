// Predicts how long an all-reduce takes on a network. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pccl/topology/plan.h"
#include "pccl/topology/rates.h"

namespace pccl::topology {

// A schedule as sites run it.
struct Flow {
  enum class Way : std::uint8_t { straight, around, regional };
  Way way = Way::straight;           // to the owners; along a ring in `order`; region to region
  std::vector<std::uint32_t> order;  // of sites
  std::vector<double> owned;         // by site, fractions of the array
  std::vector<std::uint32_t> regions = {};  // by site
};
[[nodiscard]] Flow::Way way_of(wire::ScheduleKind kind);

// A network with the regions of its sites, if it has regions, and the lines between these.
struct Terrain {
  Network net;
  std::optional<std::vector<std::uint32_t>> regions;
  std::vector<double> between;  // see between_regions

  explicit Terrain(Network network);
  // Takes these for the network's regions.
  void divide(const std::vector<std::uint32_t>& into);
};

// The sites when every rank is a site of its own, in this order.
[[nodiscard]] HostRanks each_alone(const std::vector<std::uint32_t>& order);
// The fraction of the array that each site owns, from the shares of ranks.
[[nodiscard]] std::vector<double> owned_by(const HostRanks& sites,
                                           const std::vector<std::uint32_t>& shares);

// Seconds for one all-reduce of `bytes` bytes: the longer of two times, plus the delays on the
// longest path. One is the busy time of the busiest up-link, down-link, pair or path between
// regions. The other is the time of one chunk's segments in sequence. Infinite where an unusable
// pair is used.
[[nodiscard]] double seconds(const Terrain& terrain, const Flow& flow, std::uint64_t bytes,
                             std::uint32_t segment_bytes);
// The same for the schedule that `plan` runs at this size.
[[nodiscard]] double predict(const wire::Plan& plan, const wire::RateTable& rates,
                             std::uint64_t bytes);

// A lower bound, in seconds without delays, for any all-reduce of `bytes` bytes on this network.
// Every site must send and receive each byte of the array once. All sites together must transfer it
// 2 (n - 1) times: before any site has a byte of the result, n - 1 others have sent something of
// it, and afterwards n - 1 have yet to receive it (for equal links the 2 (n - 1) / n of Patarasuk &
// Yuan, JPDC 2009).
[[nodiscard]] double lower_bound(const Network& network, std::uint64_t bytes);

// Whether `other` improves enough on `present` to begin an epoch for it: at some size it saves a
// fifth and at least a millisecond, and at no size does it take over 10 % more.
[[nodiscard]] bool worth_changing(const wire::Plan& present, const wire::Plan& other,
                                  const wire::RateTable& rates);

}  // namespace pccl::topology
