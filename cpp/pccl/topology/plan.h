// The plan of an epoch: which schedule operations of each size use, and on which links. Pure
// integer functions. The master makes plans; peers only read them.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "pccl/wire/records.h"

namespace pccl::topology {

// A pair of ranks, first < second.
using Edge = std::pair<std::uint32_t, std::uint32_t>;

// Groups of more hosts have no `direct` schedules, which need a link between every two members:
// instead of these they reduce by regions, of as many hosts as there are regions.
inline constexpr std::uint32_t kMaxMesh = 32;

// SizeClass::max_bytes of the class for all larger operations.
inline constexpr std::uint64_t kAnySize = std::numeric_limits<std::uint64_t>::max();

// The sizes at which the schedule changes without measurements. Tests use smaller ones.
struct Thresholds {
  // Up to this many bytes one rank combines everything, which takes the fewest messages.
  std::uint64_t single_owner_bytes = 16 << 10;
  // Up to this many bytes every rank owns a share and all send directly. Above, the fewer and
  // longer streams of a ring are faster.
  std::uint64_t direct_bytes = 512 << 10;
  // So many hosts, at most, have links between every two.
  std::uint32_t mesh = kMaxMesh;

  // The largest array that is not reduced around a ring. With more than `mesh` hosts it is larger,
  // since a ring has more hops: four times what each would own of `direct_bytes` on `mesh` hosts.
  [[nodiscard]] std::uint64_t short_bytes(std::size_t hosts) const {
    return hosts <= mesh ? direct_bytes : 4 * direct_bytes * hosts / mesh;
  }
};

// The plan for `world` ranks without measurements, which uses none of the `unusable` links.
// `hosts`: see hosts() below; empty: unknown. With several ranks on one of several hosts, each host
// sends the others what a single rank would. When no ring avoids all unusable links, the ranks that
// have a link to every other rank own everything at every size. Empty: there is no such rank
// either. With more than Thresholds::mesh hosts, regions reduce what is too small for a ring.
[[nodiscard]] std::optional<wire::Plan> make_plan(std::uint32_t world, std::uint32_t segment_bytes,
                                                  const std::set<Edge>& unusable,
                                                  const std::vector<std::uint32_t>& hosts = {},
                                                  const Thresholds& thresholds = {});

// The `unusable` links to relay so that a plan exists: at most `most`, none of `never`. They
// complete the plan that would be made if all links worked, a ring, or the links between one rank
// and all others. Few links are preferred. Empty: no plan exists even with relays. REQUIRES: no
// plan avoids all `unusable` links.
[[nodiscard]] std::set<Edge> detours(std::uint32_t world, const std::set<Edge>& unusable,
                                     const std::set<Edge>& never, std::size_t most,
                                     const std::vector<std::uint32_t>& hosts = {});

// Whether a plan exists, with detours if necessary. Searches for a ring, which may take a while,
// only when no rank reaches all others.
[[nodiscard]] bool plannable(std::uint32_t world, const std::set<Edge>& unusable,
                             const std::set<Edge>& never, std::size_t most);

// The ranks of each host, ascending; hosts in order of their first rank in `order`.
using HostRanks = std::vector<std::vector<std::uint32_t>>;
[[nodiscard]] HostRanks by_host(std::span<const std::uint32_t> order,
                                std::span<const std::uint32_t> hosts);

// The rank that represents each host for the chunk of one owner: on the owner's host the owner,
// elsewhere the rank with the same index on its host. So all ranks share the traffic between hosts.
class Delegates {
 public:
  // REQUIRES: `owner` is on one of the hosts; `hosts` outlives this object.
  Delegates(const HostRanks& hosts, std::uint32_t owner);
  [[nodiscard]] std::size_t home() const { return home_; }  // the owner's host
  [[nodiscard]] std::uint32_t of(std::size_t host) const;

 private:
  const HostRanks& hosts_;
  std::size_t home_ = 0;
  std::size_t index_ = 0;  // of the owner on its host
};

// The ranks of each host and the hosts of each region. Hosts and regions are numbered by their
// position in these lists.
struct Hierarchy {
  HostRanks hosts;
  HostRanks regions;
  std::vector<std::uint32_t> host_of;    // by rank
  std::vector<std::uint32_t> region_of;  // by host
};

// `regions`: by rank; empty: every host is a region. REQUIRES: hosts hold the ranks 0 to n - 1, and
// all ranks of a host are in the same region.
[[nodiscard]] Hierarchy hierarchy(const HostRanks& hosts, std::span<const std::uint32_t> regions);

// Regions for hosts of which none are known to be near each other: about as many as each has hosts,
// by position in an order of all hosts.
[[nodiscard]] std::vector<std::uint32_t> even_regions(std::size_t hosts);

// The number of ranks in the largest region.
[[nodiscard]] std::size_t largest_region(const Hierarchy& levels);

// The hierarchy of a plan, with hosts in order of ranks, so that delegates do not depend on the
// ring.
[[nodiscard]] Hierarchy hierarchy(const wire::Plan& plan);

// The tree on which contributions to the chunk of one owner are combined: on every host, then in
// every region, then at the owner. Delegates represent the other hosts and regions.
class Tree {
 public:
  // REQUIRES: `owner` is on one of the hosts; `levels` outlives this object.
  Tree(const Hierarchy& levels, std::uint32_t owner);
  // The rank that receives the combined contribution of `rank` and sends back the result. For the
  // owner: the owner itself. REQUIRES: `rank` is on one of the hosts.
  [[nodiscard]] std::uint32_t above(std::uint32_t rank) const;
  // Whether `rank` represents its region towards the owner, which is in another region.
  [[nodiscard]] bool leaves_region(std::uint32_t rank) const;

 private:
  const Hierarchy& levels_;
  std::uint32_t owner_ = 0;
  Delegates of_hosts_;
  Delegates of_regions_;
};

// The size class of an operation of `bytes` bytes. `widens`: its partial results take more bytes
// than its elements (float16, bfloat16, small integers under avg), so that `direct`, which sends
// elements only, is better than a ring at every size; so is `regional`, which sends few partial
// results. `coded`: its elements travel quantized, so that fewer hops are better. REQUIRES:
// plan.classes is not empty.
[[nodiscard]] const wire::SizeClass& size_class(const wire::Plan& plan, std::uint64_t bytes,
                                                bool widens, bool coded = false);

// Whether every rank owns a part of arrays of this class.
[[nodiscard]] bool owned_by_all(const wire::SizeClass& size);

// The class for halves of an all-reduce of class `size`, for which every rank must be an owner:
// `size` itself if all own a part of it; another class of its kind that all own; a ring; or else
// `size` again, where everything passes through one of its owners. (A plan has links to owners
// only.)
[[nodiscard]] const wire::SizeClass& all_owning(const wire::Plan& plan,
                                                const wire::SizeClass& size);

// Whether a received plan is valid for `world` members.
[[nodiscard]] bool valid(const wire::Plan& plan, std::size_t world);

// All links that the plan may use, and whether it uses none of `unusable`.
[[nodiscard]] std::set<Edge> edges(const wire::Plan& plan);
[[nodiscard]] bool avoids(const wire::Plan& plan, const std::set<Edge>& unusable);

// Whether operations of this kind first reduce on every host, then between hosts.
[[nodiscard]] bool between_hosts(wire::ScheduleKind kind);

// The host number of each rank. A rank belongs to the first host whose ranks all share memory with
// it. `shared`: the pairs that share memory.
[[nodiscard]] std::vector<std::uint32_t> hosts(std::uint32_t world, const std::set<Edge>& shared);

// Whether there are several ranks, all on one host.
[[nodiscard]] bool on_one_host(const wire::Plan& plan);

// A hash of the plan; a part of each operation's signature.
[[nodiscard]] std::uint64_t hash(const wire::Plan& plan);

}  // namespace pccl::topology
