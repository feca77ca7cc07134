#include "pccl/collective/schedule.h"

#include <algorithm>
#include <cassert>
#include <numeric>
#include <optional>
#include <utility>

namespace pccl::collective {
namespace {

// Up to this size the root sends a broadcast to all ranks. Larger ones go from rank to rank, so
// that each sends them only once.
constexpr std::uint64_t kStarBytes = 64 << 10;

}  // namespace

const char* name(Kind kind) {
  switch (kind) {
    case Kind::all_reduce:
      return "all_reduce";
    case Kind::reduce_scatter:
      return "reduce_scatter";
    case Kind::all_gather:
      return "all_gather";
    case Kind::broadcast:
      return "broadcast";
    case Kind::all_to_all:
      return "all_to_all";
  }
  return "?";
}

Schedule ring(std::span<const std::uint32_t> order, std::uint32_t rank) {
  const std::size_t n = order.size();
  std::size_t position = 0;
  while (position < n && order[position] != rank) ++position;
  assert(position < n);
  const std::uint32_t previous = order[(position + n - 1) % n];
  const std::uint32_t next = order[(position + 1) % n];

  Schedule schedule{.chunks = std::vector<ChunkFlow>(n),
                    .shares = std::vector<std::uint32_t>(n, 1)};
  if (n == 1) return schedule;
  for (std::size_t chunk = 0; chunk < n; ++chunk) {
    ChunkFlow& flow = schedule.chunks[chunk];
    // Hops of the partial result from its start, position chunk+1, to this rank. The owner is the
    // last of the n ranks.
    const std::size_t hops = (position + n - chunk - 1) % n;
    if (hops > 0) flow.sources.push_back({previous, hops > 1});
    if (position == chunk) {
      flow.final_to.push_back(next);
    } else {
      flow.partial_to = next;
      flow.final_from = previous;
      if ((position + 1) % n != chunk) flow.final_to.push_back(next);
    }
  }
  return schedule;
}

Schedule direct(std::span<const std::uint32_t> shares, std::uint32_t rank) {
  assert(rank < shares.size());
  Schedule schedule{.chunks = std::vector<ChunkFlow>(shares.size()),
                    .shares = {shares.begin(), shares.end()}};
  for (std::uint32_t chunk = 0; chunk < shares.size(); ++chunk) {
    ChunkFlow& flow = schedule.chunks[chunk];
    if (chunk != rank) {
      flow.partial_to = chunk;
      flow.final_from = chunk;
      continue;
    }
    for (std::uint32_t other = 0; other < shares.size(); ++other) {
      if (other == rank) continue;
      flow.sources.push_back({other, false});
      flow.final_to.push_back(other);
    }
  }
  return schedule;
}

Schedule by_hosts(const topology::HostRanks& hosts, std::span<const std::uint32_t> shares,
                  bool around, std::uint32_t rank) {
  assert(rank < shares.size());
  const std::size_t n = hosts.size();
  std::size_t here = 0;
  while (std::ranges::find(hosts[here], rank) == hosts[here].end()) ++here;

  Schedule schedule{.chunks = std::vector<ChunkFlow>(shares.size()),
                    .shares = {shares.begin(), shares.end()}};
  for (std::uint32_t chunk = 0; chunk < shares.size(); ++chunk) {
    ChunkFlow& flow = schedule.chunks[chunk];
    const topology::Delegates delegates(hosts, chunk);
    const std::uint32_t delegate = delegates.of(here);
    if (delegate != rank) {
      flow.partial_to = delegate;
      flow.final_from = delegate;
      continue;
    }
    for (const std::uint32_t neighbour : hosts[here]) {
      if (neighbour == rank) continue;
      flow.sources.push_back({neighbour, false});
      flow.final_to.push_back(neighbour);
    }
    const bool home = here == delegates.home();
    if (!around) {
      for (std::size_t host = 0; host < n && home; ++host) {
        if (host == here) continue;
        flow.sources.push_back({delegates.of(host), hosts[host].size() > 1, false});
        flow.final_to.push_back(delegates.of(host));
      }
      if (!home) flow.partial_to = flow.final_from = chunk;
      flow.paced = !home && flow.sources.empty();
      continue;
    }
    // Hops of the partial result from its start, the host after the owner's, to this host.
    const std::size_t hops = (here + n - delegates.home() - 1) % n;
    const std::size_t before = (here + n - 1) % n;
    const std::uint32_t previous = delegates.of(before);
    const std::uint32_t next = delegates.of((here + 1) % n);
    if (hops > 0) flow.sources.push_back({previous, hops > 1 || hosts[before].size() > 1, false});
    if (!home) {
      flow.partial_to = next;
      flow.final_from = previous;
    }
    if ((here + 1) % n != delegates.home()) flow.final_to.push_back(next);
    flow.paced = !home && flow.sources.empty();
  }
  return schedule;
}

Schedule by_regions(const topology::Hierarchy& levels, std::span<const std::uint32_t> shares,
                    std::uint32_t rank) {
  assert(rank < shares.size());
  // The order in which contributions are combined.
  std::vector<std::uint32_t> order;
  for (const auto& region : levels.regions)
    for (const std::uint32_t host : region)
      order.insert(order.end(), levels.hosts[host].begin(), levels.hosts[host].end());

  Schedule schedule{.chunks = std::vector<ChunkFlow>(shares.size()),
                    .shares = {shares.begin(), shares.end()}};
  std::vector<std::uint32_t> above(shares.size());
  std::vector<bool> combines(shares.size());
  for (std::uint32_t chunk = 0; chunk < shares.size(); ++chunk) {
    if (shares[chunk] == 0) continue;
    ChunkFlow& flow = schedule.chunks[chunk];
    const topology::Tree tree(levels, chunk);
    combines.assign(shares.size(), false);
    for (const std::uint32_t other : order) {
      above[other] = tree.above(other);
      if (other != chunk) combines[above[other]] = true;
    }
    for (const std::uint32_t other : order) {
      if (other == rank || other == chunk || above[other] != rank) continue;
      // No window for ranks that combine contributions, nor for those that send from their region
      // to the owner: windows could wait for each other in a circle.
      const bool windowed = !combines[other] && !tree.leaves_region(other);
      flow.sources.push_back({other, combines[other], windowed});
      flow.final_to.push_back(other);
    }
    if (rank == chunk) continue;
    flow.partial_to = flow.final_from = above[rank];
    flow.paced = tree.leaves_region(rank) && flow.sources.empty();
  }
  return schedule;
}

Schedule through(std::uint32_t hub, std::size_t ranks, std::uint32_t rank) {
  assert(rank < ranks && hub < ranks && ranks > 2);
  Schedule schedule{.chunks = std::vector<ChunkFlow>(ranks),
                    .shares = std::vector<std::uint32_t>(ranks, 1)};
  for (std::uint32_t owner = 0; owner < ranks; ++owner) {
    ChunkFlow& flow = schedule.chunks[owner];
    if (rank == hub) {
      for (std::uint32_t other = 0; other < ranks; ++other) {
        if (other == hub || other == owner) continue;
        flow.sources.push_back({other, false});
        flow.final_to.push_back(other);
      }
      if (owner != hub) flow.partial_to = flow.final_from = owner;
    } else if (rank == owner) {
      flow.sources.push_back({hub, true, false});
      flow.final_to.push_back(hub);
    } else {
      flow.partial_to = flow.final_from = hub;
    }
  }
  return schedule;
}

Schedule reduce_scatter(const Schedule& all_reduce, std::span<const std::uint32_t> owners) {
  Schedule half{.chunks = std::vector<ChunkFlow>(owners.size()),
                .shares = std::vector<std::uint32_t>(owners.size(), 1)};
  for (std::size_t chunk = 0; chunk < owners.size(); ++chunk) {
    ChunkFlow& flow = half.chunks[owners[chunk]] = all_reduce.chunks[chunk];
    flow.final_from = kNobody;
    flow.final_to.clear();
  }
  return half;
}

Schedule all_gather(const Schedule& all_reduce, std::span<const std::uint32_t> owners) {
  Schedule half{.chunks = std::vector<ChunkFlow>(owners.size()),
                .shares = std::vector<std::uint32_t>(owners.size(), 1)};
  for (std::size_t chunk = 0; chunk < owners.size(); ++chunk) {
    ChunkFlow& flow = half.chunks[owners[chunk]] = all_reduce.chunks[chunk];
    flow.sources.clear();
    flow.partial_to = kNobody;
    flow.paced = false;
  }
  return half;
}

Schedule broadcast(const Schedule& all_reduce, std::span<const std::uint32_t> owners,
                   std::uint32_t root) {
  assert(root < owners.size());
  Schedule whole = all_gather(all_reduce, owners);
  return {{std::move(whole.chunks[root])}, {1}};
}

Schedule all_to_all(const std::function<Schedule(std::uint32_t)>& half, std::uint32_t rank,
                    std::uint32_t most) {
  Schedule schedule = half(rank);
  std::vector<std::optional<Schedule>> halves(schedule.chunks.size());
  const auto sources = [&](std::uint32_t of, std::size_t chunk) -> const std::vector<Source>& {
    if (!halves[of]) halves[of] = half(of);
    return halves[of]->chunks[chunk].sources;
  };
  for (std::size_t chunk = 0; chunk < schedule.chunks.size(); ++chunk) {
    const auto list = [&](const auto& self, const Source& source,
                          std::vector<std::uint32_t>& found) -> void {
      found.push_back(source.rank);
      if (!source.accumulated) return;
      for (const Source& before : sources(source.rank, chunk)) self(self, before, found);
    };
    for (Source& source : schedule.chunks[chunk].sources) list(list, source, source.ranks);
  }
  schedule.most_ranks = most;
  return schedule;
}

namespace {

// The schedule of an all-reduce, and the owners of its chunks, on which a collective is based.
std::pair<Schedule, std::vector<std::uint32_t>> basis(const wire::Plan& plan,
                                                      const wire::SizeClass& size,
                                                      std::uint32_t rank, Kind kind,
                                                      std::uint64_t bytes) {
  std::vector<std::uint32_t> owners(plan.order.size());
  std::iota(owners.begin(), owners.end(), 0U);
  const bool star = size.kind == wire::ScheduleKind::direct;
  // Kinds other than all_reduce need every rank as an owner. If some ranks own nothing, everything
  // passes through one that owns a part. Two ranks have no rank between them and use the ring.
  const bool lacks_owners = kind != Kind::all_reduce && !topology::owned_by_all(size);
  if (lacks_owners && owners.size() > 2) {
    const auto hub = std::ranges::find_if(size.shares, [](std::uint32_t s) { return s > 0; });
    return {through(static_cast<std::uint32_t>(hub - size.shares.begin()), owners.size(), rank),
            owners};
  }
  if (lacks_owners || size.kind == wire::ScheduleKind::ring ||
      (star && kind == Kind::broadcast && bytes > kStarBytes)) {
    return {ring(plan.order, rank), plan.order};
  }
  if (star) return {direct(size.shares, rank), owners};
  if (size.kind == wire::ScheduleKind::regional)
    return {by_regions(topology::hierarchy(plan), size.shares, rank), owners};
  return {by_hosts(topology::by_host(plan.order, plan.hosts), size.shares,
                   size.kind == wire::ScheduleKind::host_ring, rank),
          owners};
}

// Elements go straight to their receivers if any class of the plan uses links between all ranks.
// Otherwise they take the paths of a reduce-scatter, by regions where it would be a ring: there
// every rank would pass on the elements of half of the others.
Schedule exchange(const wire::Plan& plan, const wire::SizeClass& size, std::uint32_t rank) {
  const auto owned = [&](wire::ScheduleKind kind) -> const wire::SizeClass* {
    const auto found = std::ranges::find_if(plan.classes, [&](const wire::SizeClass& each) {
      return each.kind == kind && topology::owned_by_all(each);
    });
    return found == plan.classes.end() ? nullptr : &*found;
  };
  const wire::SizeClass* used = owned(wire::ScheduleKind::direct);
  const bool mesh = used != nullptr;
  if (!mesh &&
      (size.kind == wire::ScheduleKind::ring || size.kind == wire::ScheduleKind::host_ring))
    used = owned(wire::ScheduleKind::regional);
  if (used == nullptr) used = &size;
  const auto half = [&](std::uint32_t of) {
    const auto [whole, owners] = basis(plan, *used, of, Kind::all_to_all, 0);
    return reduce_scatter(whole, owners);
  };
  if (!mesh) {
    const std::size_t most = used->kind == wire::ScheduleKind::regional
                                 ? topology::largest_region(topology::hierarchy(plan))
                                 : plan.order.size();
    return all_to_all(half, rank, static_cast<std::uint32_t>(most));
  }
  Schedule schedule = half(rank);
  for (ChunkFlow& flow : schedule.chunks)
    for (Source& source : flow.sources) source.ranks = {source.rank};
  return schedule;
}

}  // namespace

Schedule make_schedule(const wire::Plan& plan, const wire::SizeClass& chosen, std::uint32_t rank,
                       const Collective& what, std::uint64_t bytes) {
  const wire::SizeClass& size =
      what.kind == Kind::all_reduce ? chosen : topology::all_owning(plan, chosen);
  if (what.kind == Kind::all_to_all) return exchange(plan, size, rank);
  auto [whole, owners] = basis(plan, size, rank, what.kind, bytes);
  switch (what.kind) {
    case Kind::all_reduce:
    case Kind::all_to_all:
      break;
    case Kind::reduce_scatter:
      return reduce_scatter(whole, owners);
    case Kind::all_gather:
      return all_gather(whole, owners);
    case Kind::broadcast:
      return broadcast(whole, owners, what.root);
  }
  return std::move(whole);
}

}  // namespace pccl::collective
