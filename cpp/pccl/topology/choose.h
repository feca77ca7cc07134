// Which plan takes least time, by what is known of the network. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/topology/plan.h"
#include "pccl/topology/rates.h"
#include "pccl/wire/records.h"

namespace pccl::topology {

// What a plan is made for.
struct Situation {
  std::uint32_t world = 0;
  std::uint32_t segment_bytes = 0;   // at most; less where links are known to be slow
  std::set<Edge> unusable;           // the plan must do without
  std::vector<std::uint32_t> hosts;  // by rank; empty: not known
  wire::RateTable rates;             // of that many ranks, or empty
  Thresholds thresholds;
};

struct Choice {
  wire::Plan plan;
  // One sentence for the log: what was chosen, the times predicted for it and for what was not, and
  // for up to 16 sites how far that is from the lower bound. Empty where nothing is measured.
  std::string why;
};

// The plan whose predicted time is least, at every size: of one owner for all, `direct` with equal
// shares or with best_shares, and the best ring (with several ranks on some of several hosts, the
// same between hosts), and by regions, where there are some (see regions.h). Where the plan without
// measurements is as good to within 3 %, it stays; uneven shares have to be better by a quarter.
// Pairs that were tried in vain are avoided if some plan can. Where no ring is left, the plan
// without measurements. Nothing when none avoids the `unusable` ones.
[[nodiscard]] std::optional<Choice> choose(const Situation& situation);

// Seconds for one all-reduce of so many bytes: the time that the busiest up-link, down-link, pair
// or way between regions is busy, or a chunk's segments need one after the other on their way,
// whichever is longer; and the delays on the longest way. Infinite where a pair is used that cannot
// be.
[[nodiscard]] double predict(const wire::Plan& plan, const wire::RateTable& rates,
                             std::uint64_t bytes);

// No all-reduce of so many bytes takes less on this network, whatever its schedule: every site must
// send each byte of the array once and receive it once (its elements count for everybody's result,
// and everybody's for its own); and all of them together 2 (n - 1) times, for before anyone has a
// byte of the result n - 1 others have sent something of it, and then n - 1 have yet to receive it
// (for equal links the 2 (n - 1) / n of Patarasuk & Yuan, JPDC 2009). Seconds, without delays.
[[nodiscard]] double lower_bound(const Network& network, std::uint64_t bytes);

// Whether another plan is enough of an improvement to begin an epoch for it that nobody asked for:
// somewhere it takes a fifth less, and a millisecond at least; and nowhere 10 % more.
[[nodiscard]] bool worth_changing(const wire::Plan& present, const wire::Plan& other,
                                  const wire::RateTable& rates);

}  // namespace pccl::topology
