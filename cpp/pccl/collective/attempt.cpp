#include "pccl/collective/attempt.h"

#include <algorithm>

namespace pccl::collective {

// At least as many bytes as are on the way on a long and fast link.
std::uint32_t max_window(std::uint64_t segment_bytes) {
  constexpr std::uint64_t kBytes = 32 << 20;
  return static_cast<std::uint32_t>(std::max<std::uint64_t>(64, kBytes / segment_bytes));
}

std::uint32_t RunningAttempt::contribution_bytes(std::uint32_t segment, std::uint32_t from,
                                                 std::uint32_t to, bool accumulated) const {
  const Segment& cut = layout.segments[segment];
  if (is_coded(cut.chunk, from, to)) {
    const CodedBytes& bytes = coded[segment];
    return accumulated ? bytes.accumulated : bytes.raw;
  }
  return accumulated ? cut.accumulated_bytes : cut.raw_bytes;
}

std::uint32_t RunningAttempt::received_bytes(std::uint32_t segment, const Source& source) const {
  if (spec.what.kind == Kind::all_to_all)
    return layout.segments[segment].raw_bytes * static_cast<std::uint32_t>(source.ranks.size());
  return contribution_bytes(segment, source.rank, spec.rank, source.accumulated);
}

std::uint32_t RunningAttempt::contributed_bytes(std::uint32_t segment) const {
  const Segment& cut = layout.segments[segment];
  const ChunkFlow& flow = schedule.chunks[cut.chunk];
  if (spec.what.kind != Kind::all_to_all)
    return contribution_bytes(segment, spec.rank, flow.partial_to, !flow.sources.empty());
  std::size_t parts = 1;
  for (const Source& source : flow.sources) parts += source.ranks.size();
  return cut.raw_bytes * static_cast<std::uint32_t>(parts);
}

std::uint32_t RunningAttempt::result_bytes(std::uint32_t segment) const {
  return spec.quantization ? coded[segment].result : layout.segments[segment].raw_bytes;
}

std::uint32_t RunningAttempt::source_index(std::uint32_t segment, const PeerId& from) const {
  const auto rank = ranks.find(from);
  if (rank == ranks.end()) return kNoSource;
  const auto& sources = schedule.chunks[layout.segments[segment].chunk].sources;
  for (std::uint32_t i = 0; i < sources.size(); ++i) {
    if (sources[i].rank == rank->second) return i;
  }
  return kNoSource;
}

std::uint64_t RunningAttempt::unasked_bytes_from(std::uint32_t rank) const {
  std::uint64_t bytes = 0;
  for (std::uint32_t index = 0; index < layout.segments.size(); ++index) {
    const Segment& segment = layout.segments[index];
    const ChunkFlow& flow = schedule.chunks[segment.chunk];
    for (const Source& source : flow.sources) {
      if (source.rank == rank) bytes += received_bytes(index, source);
    }
    if (results_first() && flow.final_from == rank) bytes += segment.raw_bytes;
  }
  return bytes;
}

const std::uint8_t* RunningAttempt::own_at(std::uint32_t chunk, const Piece& piece) const {
  const ArrayRef& array = spec.arrays[piece.array];
  const bool parts = scatters(spec.what.kind);
  const std::uint64_t first = piece.first + (parts ? chunk * array.count : 0);
  return static_cast<const std::uint8_t*>(array.send) + first * element_size(array.dtype);
}

std::uint8_t* RunningAttempt::result_at(std::uint32_t from, const Piece& piece) const {
  const ArrayRef& array = spec.arrays[piece.array];
  const bool parts = gathers(spec.what.kind);
  const std::uint64_t first = piece.first + (parts ? from * array.count : 0);
  return out[piece.array] + first * element_size(array.dtype);
}

bool RunningAttempt::is_coded(std::uint32_t chunk, std::uint32_t from, std::uint32_t to) const {
  if (!spec.quantization || !straight) return false;
  // By regions, contributions are also combined between sender and owner.
  if (to != chunk && !regional) return false;
  const auto& hosts = spec.world->plan.hosts;
  return hosts.empty() || hosts[from] != hosts[to];
}

void RunningAttempt::result_memory(const Segment& segment, std::uint32_t from,
                                   link::Placement& placement) const {
  for (const Piece& piece : layout.pieces_of(segment)) {
    const std::size_t element = element_size(spec.arrays[piece.array].dtype);
    placement.where.push_back(link::vec(result_at(from, piece), piece.count * element));
  }
}

bool RunningAttempt::sendable(const Outlet& outlet) const {
  if (!outlet.finals.empty()) return !results_first() || outlet.eager || outlet.credit > 0;
  if (outlet.partials.empty() || (!outlet.eager && outlet.credit == 0)) return false;
  const auto [place, index] = *outlet.partials.begin();
  if (!schedule.chunks[layout.segments[index].chunk].paced) return true;
  return combining >= to_combine.size() ||
         place < combining + max_window(spec.world->plan.segment_bytes);
}

}  // namespace pccl::collective
