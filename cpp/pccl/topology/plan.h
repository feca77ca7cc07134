// The plan of an epoch: which schedule operations of each size run, and along which links. Pure
// integer functions of what the master knows; peers only read the result.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "pccl/base/dtype.h"
#include "pccl/wire/records.h"

namespace pccl::topology {

// A pair of ranks, first < second.
using Edge = std::pair<std::uint32_t, std::uint32_t>;

// Groups above this size run rings only: `direct` wants a link between every two members.
inline constexpr std::uint32_t kMaxMesh = 32;

// Where one schedule ends and the next begins. Tests use smaller ones.
struct Thresholds {
  // Up to this many bytes one rank combines everything: the fewest messages.
  std::uint64_t single_owner_bytes = 16 << 10;
  // Up to this many bytes every rank owns a share and sends directly; above, the ring's fewer,
  // longer streams win.
  std::uint64_t direct_bytes = 512 << 10;
};

// The plan for `world` ranks that uses none of the `unusable` links. `hosts` says where they are
// (see hosts() below; empty: not known): with several ranks on one of several hosts, each host
// sends the others what a single rank would. Where no ring avoids all unusable links, the ranks
// that have a link to every other one own everything, at every size; nothing when there are none.
[[nodiscard]] std::optional<wire::Plan> make_plan(std::uint32_t world, std::uint32_t segment_bytes,
                                                  const std::set<Edge>& unusable,
                                                  const std::vector<std::uint32_t>& hosts = {},
                                                  const Thresholds& thresholds = {});

// Where no plan avoids all `unusable` links: those of them that have to be made to work in another
// way, for a plan of the rest. As few as can be found, at most `most`, and none of `never`; those
// of a ring, or else those between one rank and all others. Empty: there is no such plan either.
[[nodiscard]] std::set<Edge> detours(std::uint32_t world, const std::set<Edge>& unusable,
                                     const std::set<Edge>& never, std::size_t most,
                                     const std::vector<std::uint32_t>& hosts = {});

// There is a plan, with such detours if need be. A search only where nobody reaches all others, as
// a ring among many that reach few takes a while to be found, or not to be.
[[nodiscard]] bool plannable(std::uint32_t world, const std::set<Edge>& unusable,
                             const std::set<Edge>& never, std::size_t most);

// The ranks of each host, ascending; hosts in the order in which `order` reaches them.
using HostRanks = std::vector<std::vector<std::uint32_t>>;
[[nodiscard]] HostRanks by_host(std::span<const std::uint32_t> order,
                                std::span<const std::uint32_t> hosts);

// Who speaks for a host in what one rank owns: at home the owner, elsewhere the rank in the same
// place among its neighbours, so that every rank carries its slice between hosts.
class Delegates {
 public:
  // REQUIRES: `owner` is on one of the hosts.
  Delegates(const HostRanks& hosts, std::uint32_t owner);
  [[nodiscard]] std::size_t home() const { return home_; }  // the owner's host
  [[nodiscard]] std::uint32_t of(std::size_t host) const;

 private:
  const HostRanks& hosts_;
  std::size_t home_ = 0;
  std::size_t place_ = 0;  // of the owner, at home
};

// The ranks of each host, and the hosts of each region, both by their places in these lists.
struct Places {
  HostRanks hosts;
  HostRanks regions;
  std::vector<std::uint32_t> host_of;    // by rank
  std::vector<std::uint32_t> region_of;  // by host
};

// From the region of each rank; where that is not known, every host is one. REQUIRES: hosts hold
// 0..n-1, all ranks of one are in the same region.
[[nodiscard]] Places places(const HostRanks& hosts, std::span<const std::uint32_t> regions);

// Those of a plan, in the order of ranks: who speaks for whom does not depend on the ring.
[[nodiscard]] Places places(const wire::Plan& plan);

// The way to the owner of a chunk where contributions meet on every host, then in every region: a
// tree with the owner at its top. It speaks for its host and region, elsewhere Delegates do.
class Tree {
 public:
  // REQUIRES: `owner` is on one of the hosts, and every host in one of the regions.
  Tree(const Places& places, std::uint32_t owner);
  // To whom `rank` gives what it combined, and who gives it the result; the owner: itself.
  // REQUIRES: it is on one of the hosts.
  [[nodiscard]] std::uint32_t above(std::uint32_t rank) const;
  // It is the one of its region that gives to the owner.
  [[nodiscard]] bool leaves_region(std::uint32_t rank) const;

 private:
  const Places& places_;
  std::uint32_t owner_ = 0;
  Delegates of_hosts_;
  Delegates of_regions_;
};

// The size class an operation of `bytes` bytes runs in. `widens`: partial results of its elements
// take more bytes than the elements (float16, bfloat16, small integers under avg), so where every
// rank would send some, `direct`, which sends elements only, is the better choice at every size.
// `coded`: what travels is quantized, so the fewer hops the better. REQUIRES: plan.classes is not
// empty.
[[nodiscard]] const wire::SizeClass& size_class(const wire::Plan& plan, std::uint64_t bytes,
                                                bool widens, bool coded = false);

// Every rank owns a part of arrays of this class.
[[nodiscard]] bool owned_by_all(const wire::SizeClass& size);

// The class whose links serve every rank as an owner, for what halves of an all-reduce in `size`
// bring: itself; one of its kind that all own; else a ring. (The plan's links lead to owners only.)
// Itself again where there is no ring: then everything goes through an owner.
[[nodiscard]] const wire::SizeClass& all_owning(const wire::Plan& plan,
                                                const wire::SizeClass& size);

// Whether a plan that came from elsewhere is one that `world` members can run.
[[nodiscard]] bool valid(const wire::Plan& plan, std::size_t world);

// All links the plan may use.
[[nodiscard]] std::set<Edge> edges(const wire::Plan& plan);

// Which ranks share a host, as a number each: a rank is put to the first host all of whose ranks it
// shares memory with. `shared` holds pairs.
[[nodiscard]] std::vector<std::uint32_t> hosts(std::uint32_t world, const std::set<Edge>& shared);

// All ranks are on one host, and there are several.
[[nodiscard]] bool on_one_host(const wire::Plan& plan);

// A hash of everything in the plan; part of each operation's signature.
[[nodiscard]] std::uint64_t hash(const wire::Plan& plan);

}  // namespace pccl::topology
