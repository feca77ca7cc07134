// Chooses the plan with the least predicted time on a measured network. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pccl/topology/plan.h"
#include "pccl/topology/rates.h"
#include "pccl/wire/records.h"

namespace pccl::topology {

// The input of a plan.
struct Situation {
  std::uint32_t world = 0;
  std::uint32_t segment_bytes = 0;   // maximum; less where links are known to be slow
  std::set<Edge> unusable;           // links that the plan must not use
  std::vector<std::uint32_t> hosts;  // by rank; empty: unknown
  wire::RateTable rates;             // for `world` ranks, or empty
  Thresholds thresholds;
};

struct Choice {
  wire::Plan plan;
  // For the log: the choice, its predicted times and those of the alternatives, and for up to 16
  // sites the ratio to the lower bound. Empty when nothing is measured.
  std::string why;
};

// The plan with the least predicted time at every size. The candidates are: a single owner;
// `direct` with equal shares, and with best_shares; the best ring; and by regions, where there are
// regions (see regions.h). With several ranks on some of several hosts, the first four run between
// hosts. With more than Thresholds::mesh hosts: a single owner and equal shares, both by regions,
// and the best ring. The plan without measurements is kept where it is within 3 % of the best;
// uneven shares must be better by a quarter. Pairs that could not connect are avoided if a plan
// can. When no ring is left, returns the plan without measurements. Empty: no plan avoids the
// `unusable` links.
[[nodiscard]] std::optional<Choice> choose(const Situation& situation);

}  // namespace pccl::topology
