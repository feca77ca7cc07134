// For tests: what a member says of ways that it has measured.
#include "pccl/peer/prober.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using pccl::peer::Prober;

pccl::PeerId numbered(std::size_t number) {
  pccl::PeerId id;
  id.bytes[15] = static_cast<std::uint8_t>(number + 1);
  return id;
}

// Of each peer: bytes that came while they were counted, microseconds until its pong came (0: none
// did), kB/s that it says it had from here (-1: it did not answer), from all, and from how many.
// Returns the row: number, unreachable, kB/s and microseconds of each link; kB/s out and in.
using Way = std::tuple<std::uint64_t, std::uint32_t, std::int64_t, std::uint64_t, std::uint32_t>;
std::tuple<std::vector<std::tuple<std::size_t, bool, std::uint32_t, std::uint32_t>>, std::uint32_t,
           std::uint32_t>
probed_row(const std::vector<Way>& ways) {
  const pccl::Instant begin{std::chrono::hours(1)};
  std::vector<pccl::PeerId> peers;
  for (std::size_t i = 0; i < ways.size(); ++i) peers.push_back(numbered(i));
  Prober prober;
  prober.begin(peers, 1, begin);
  for (std::size_t i = 0; i < ways.size(); ++i) {
    const auto& [bytes, rtt, rate, down, senders] = ways[i];
    prober.on_bytes(peers[i], 1'000'000, begin + Prober::kFill);  // before it counts
    prober.on_bytes(peers[i], bytes, begin + Prober::kCount);
    pccl::link::FrameHeader header;
    if (rtt > 0) {
      header.attempt = static_cast<std::uint64_t>(begin.time_since_epoch().count());
      prober.on_pong(peers[i], header, begin + std::chrono::microseconds(rtt + 5));
      prober.on_pong(peers[i], header, begin + std::chrono::microseconds(rtt));  // the least counts
    }
    if (rate < 0) continue;
    header.credit = static_cast<std::uint32_t>(rate);
    header.attempt = down;
    header.segment = senders;
    prober.on_probed(peers[i], header);
  }
  const pccl::wire::Measurements row = prober.row();
  std::vector<std::tuple<std::size_t, bool, std::uint32_t, std::uint32_t>> links;
  for (const auto& link : row.links)
    links.emplace_back(link.to.bytes[15] - 1U, link.rate.unreachable, link.rate.kilobytes_per_s,
                       link.rate.rtt_us);
  return {links, row.total.up_kilobytes_per_s, row.total.down_kilobytes_per_s};
}

}  // namespace

void bind_prober(nb::module_& m) { m.def("probed_row", &probed_row, "ways"_a); }
