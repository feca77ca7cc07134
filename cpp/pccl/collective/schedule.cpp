#include "pccl/collective/schedule.h"

#include <cassert>

namespace pccl::collective {

Schedule ring(std::span<const std::uint32_t> order, std::uint32_t rank) {
  const std::size_t n = order.size();
  std::size_t position = 0;
  while (position < n && order[position] != rank) ++position;
  assert(position < n);
  const std::uint32_t previous = order[(position + n - 1) % n];
  const std::uint32_t next = order[(position + 1) % n];

  Schedule schedule;
  schedule.shares.assign(n, 1);
  schedule.chunks.resize(n);
  if (n == 1) return schedule;
  for (std::size_t chunk = 0; chunk < n; ++chunk) {
    ChunkFlow& flow = schedule.chunks[chunk];
    // Hops from where the partial result starts, position chunk+1, to here; the owner is the last
    // of n.
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
  Schedule schedule;
  schedule.shares.assign(shares.begin(), shares.end());
  schedule.chunks.resize(shares.size());
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

}  // namespace pccl::collective
