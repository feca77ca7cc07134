// Schedules and layouts as plain Python values.
#include "pccl/collective/schedule.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;
namespace collective = pccl::collective;

namespace {

using Ranks = std::vector<std::uint32_t>;

nb::object rank_or_none(std::uint32_t rank) {
  return rank == collective::kNobody ? nb::none() : nb::object(nb::int_(rank));
}

// ([{"sources": [(rank, accumulated)], "partial_to": rank or None, "final_from": rank or None,
//    "final_to": [rank], "owner": bool}] by chunk, shares)
nb::tuple to_python(const collective::Schedule& schedule) {
  nb::list chunks;
  for (const collective::ChunkFlow& flow : schedule.chunks) {
    nb::list sources;
    for (const collective::Source& source : flow.sources) {
      sources.append(nb::make_tuple(source.rank, source.accumulated));
    }
    nb::dict chunk;
    chunk["sources"] = sources;
    chunk["partial_to"] = rank_or_none(flow.partial_to);
    chunk["final_from"] = rank_or_none(flow.final_from);
    chunk["final_to"] = nb::cast(flow.final_to);
    chunk["owner"] = flow.owner();
    chunks.append(chunk);
  }
  return nb::make_tuple(chunks, nb::cast(schedule.shares));
}

nb::tuple ring(const Ranks& order, std::uint32_t rank) {
  if (std::ranges::find(order, rank) == order.end()) throw nb::value_error("rank not in order");
  return to_python(collective::ring(order, rank));
}

nb::tuple direct(const Ranks& shares, std::uint32_t rank) {
  if (rank >= shares.size()) throw nb::value_error("no such rank");
  return to_python(collective::direct(shares, rank));
}

// `hosts` and `regions` by rank.
nb::tuple by_regions(const Ranks& hosts, const Ranks& regions, std::uint32_t rank) {
  Ranks order(hosts.size());
  std::iota(order.begin(), order.end(), 0U);
  const pccl::topology::HostRanks there = pccl::topology::by_host(order, hosts);
  return to_python(collective::by_regions(pccl::topology::hierarchy(there, regions),
                                          Ranks(hosts.size(), 1), rank));
}

// `hosts` by rank.
nb::tuple by_hosts(const Ranks& hosts, bool around, std::uint32_t rank) {
  if (rank >= hosts.size()) throw nb::value_error("no such rank");
  Ranks order(hosts.size());
  std::iota(order.begin(), order.end(), 0U);
  return to_python(collective::by_hosts(pccl::topology::by_host(order, hosts),
                                        Ranks(hosts.size(), 1), around, rank));
}

// A reduction in which every chunk passes through rank `hub`.
nb::tuple through(std::uint32_t hub, std::size_t ranks, std::uint32_t rank) {
  if (ranks < 3 || hub >= ranks || rank >= ranks) throw nb::value_error("no such rank");
  return to_python(collective::through(hub, ranks, rank));
}

// ([(array, first, count)], [(chunk, first_piece, piece_count, raw_bytes, accumulated_bytes)])
nb::tuple cut(const std::vector<std::pair<std::uint64_t, unsigned>>& arrays, unsigned op,
              const Ranks& shares, std::uint32_t segment_bytes) {
  if (op >= pccl::kReduceOpCount) throw nb::value_error("no such op");
  if (segment_bytes < 64 || segment_bytes > (1U << 24)) throw nb::value_error("segment_bytes");
  if (std::ranges::all_of(shares, [](std::uint32_t share) { return share == 0; })) {
    throw nb::value_error("no share above 0");
  }
  std::vector<collective::ArrayShape> shapes;
  for (const auto& [count, dtype] : arrays) {
    if (dtype >= pccl::kDataTypeCount) throw nb::value_error("no such dtype");
    shapes.push_back({count, static_cast<pccl::DataType>(dtype)});
  }
  const collective::Layout layout =
      collective::cut(shapes, static_cast<pccl::ReduceOp>(op), shares, segment_bytes);
  nb::list pieces;
  for (const collective::Piece& piece : layout.pieces) {
    pieces.append(nb::make_tuple(piece.array, piece.first, piece.count));
  }
  nb::list segments;
  for (const collective::Segment& segment : layout.segments) {
    segments.append(nb::make_tuple(segment.chunk, segment.first_piece, segment.piece_count,
                                   segment.raw_bytes, segment.accumulated_bytes));
  }
  return nb::make_tuple(pieces, segments);
}

}  // namespace

void bind_schedule(nb::module_& m) {
  m.def("ring", &ring, "order"_a, "rank"_a);
  m.def("direct", &direct, "shares"_a, "rank"_a);
  m.def("by_regions", &by_regions, "hosts"_a, "regions"_a, "rank"_a);
  m.def("by_hosts", &by_hosts, "hosts"_a, "around"_a, "rank"_a);
  m.def("through", &through, "hub"_a, "ranks"_a, "rank"_a);
  m.def("cut", &cut, "arrays"_a, "op"_a, "shares"_a, "segment_bytes"_a);
}
