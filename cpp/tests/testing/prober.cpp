// A member's reports about measured links, and the filler that it sends before a call.
#include "pccl/measured/prober.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "pccl/measured/live_rates.h"
#include "pccl/measured/primer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using pccl::measured::Prober;

pccl::PeerId numbered(std::size_t number) {
  pccl::PeerId id;
  id.bytes[15] = static_cast<std::uint8_t>(number + 1);
  return id;
}

// For each peer: bytes received while counting, microseconds until its pong (0: none), the kB/s
// that it reports from here (-1: no answer) and from all peers, and the number of these. Returns
// the row: number, unreachable, kB/s and microseconds of each link, and kB/s out and in.
using Way = std::tuple<std::uint64_t, std::uint32_t, std::int64_t, std::uint64_t, std::uint32_t>;
using Row = std::tuple<std::vector<std::tuple<std::size_t, bool, std::uint32_t, std::uint32_t>>,
                       std::uint32_t, std::uint32_t>;

Row row_of(const pccl::wire::Measurements& row) {
  std::vector<std::tuple<std::size_t, bool, std::uint32_t, std::uint32_t>> links;
  for (const auto& link : row.links)
    links.emplace_back(link.to.bytes[15] - 1U, link.rate.unreachable, link.rate.kilobytes_per_s,
                       link.rate.rtt_us);
  return {links, row.total.up_kilobytes_per_s, row.total.down_kilobytes_per_s};
}

Row probed_row(const std::vector<Way>& ways) {
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
      prober.on_pong(peers[i], header,
                     begin + std::chrono::microseconds(rtt));  // the least round trip counts
    }
    if (rate < 0) continue;
    header.credit = static_cast<std::uint32_t>(rate);
    header.attempt = down;
    header.segment = senders;
    prober.on_probed(peers[i], header);
  }
  return row_of(prober.row());
}

// A member that samples its links twice a second and reports news after every sample.
class Watcher {
 public:
  // For each link: kB sent and received since the last sample, and whether it is full.
  Row look(const std::vector<std::tuple<std::uint64_t, std::uint64_t, bool>>& links) {
    std::vector<pccl::measured::LiveRates::Way> ways;
    for (const auto& [sent, received, full] : links)
      ways.push_back({numbered(ways.size()), sent * 1000, received * 1000, full});
    constexpr auto kSpan = std::chrono::milliseconds(500);
    now_ += kSpan;
    rates_.look(ways, kSpan);
    return news();
  }
  Row round_trip(std::size_t peer, std::uint32_t microseconds) {
    rates_.on_round_trip(numbered(peer), std::chrono::microseconds(microseconds));
    return news();
  }
  Row connection(std::size_t peer, std::uint32_t microseconds) {
    rates_.on_connection(numbered(peer), microseconds);
    return news();
  }
  void skip() { rates_.skip(); }
  void wait(double seconds) {
    now_ += std::chrono::duration_cast<pccl::Duration>(std::chrono::duration<double>(seconds));
  }
  // The group's table: kB/s out and in, and kB/s and microseconds of links.
  void know(std::uint32_t up, std::uint32_t down,
            const std::map<std::size_t, std::pair<std::uint32_t, std::uint32_t>>& links) {
    host_ = {up, down};
    links_.clear();
    for (const auto& [peer, rate] : links)
      links_[numbered(peer)] = {false, rate.first, rate.second};
  }

 private:
  Row news() {
    const pccl::measured::LiveRates::Known known{
        host_, [this](const pccl::PeerId& peer) {
          const auto link = links_.find(peer);
          return link == links_.end() ? pccl::wire::LinkRate{} : link->second;
        }};
    return row_of(rates_.news(known, now_));
  }

  pccl::measured::LiveRates rates_;
  pccl::Instant now_{std::chrono::hours(1)};
  pccl::wire::HostRate host_;
  std::map<pccl::PeerId, pccl::wire::LinkRate> links_;
};

// The row of links whose connections took so many microseconds to be made; 0: unknown.
Row first_round_trips(const std::vector<std::uint32_t>& connections) {
  std::vector<pccl::wire::Member> members(connections.size());
  std::map<pccl::PeerId, pccl::Duration> seen;
  for (std::size_t i = 0; i < members.size(); ++i) {
    members[i].id = numbered(i);
    seen[members[i].id] = std::chrono::microseconds(connections[i]);
  }
  return row_of(pccl::measured::first_round_trips(
      members, [&](const pccl::PeerId& peer) { return seen.at(peer); }));
}

// The filler of primed links. A link is (milliseconds of its round trip, bytes on the way at full
// rate, the most in all); its portions are (milliseconds from now, bytes). The call is expected
// after `expected` milliseconds. The links are asked every millisecond until it `begins`.
std::vector<std::vector<std::pair<int, std::uint64_t>>> primed(
    const std::vector<std::tuple<int, std::uint64_t, std::uint64_t>>& links, int expected,
    int begins) {
  using std::chrono::milliseconds;
  const pccl::Instant start{std::chrono::hours(1)};
  std::vector<pccl::measured::Primer::Way> ways;
  for (const auto& [round_trip, window, most] : links)
    ways.push_back({numbered(ways.size()), milliseconds(round_trip), window, most, 1});
  pccl::measured::Primer primer;
  primer.begin(ways, start + milliseconds(expected));
  std::vector<std::vector<std::pair<int, std::uint64_t>>> sent(links.size());
  for (int at = 0; at < begins; ++at) {
    const pccl::Instant now = start + milliseconds(at);
    const bool due = primer.next_deadline() <= now;
    // Filler comes when it is due, and at no other time.
    if (primer.on_time(now) && !due) throw std::runtime_error("no deadline was set for it");
    for (std::size_t i = 0; i < links.size(); ++i) {
      std::uint64_t bytes = 0;
      pccl::link::OutgoingFrame frame;
      while (primer.next(numbered(i), 7, frame)) bytes += frame.payload_bytes;
      if (bytes > 0) sent[i].emplace_back(at, bytes);
    }
  }
  primer.end();
  if (primer.active() || primer.next_deadline() != pccl::Instant::max())
    throw std::runtime_error("it goes on after the call has begun");
  return sent;
}

}  // namespace

void bind_prober(nb::module_& m) {
  m.def("primed", &primed, "links"_a, "expected"_a, "begins"_a);
  m.def("probed_row", &probed_row, "ways"_a);
  m.def("first_round_trips", &first_round_trips, "connections"_a);
  nb::class_<Watcher>(m, "RateWatcher")
      .def(nb::init<>())
      .def("look", &Watcher::look, "links"_a)
      .def("round_trip", &Watcher::round_trip, "peer"_a, "microseconds"_a)
      .def("connection", &Watcher::connection, "peer"_a, "microseconds"_a)
      .def("skip", &Watcher::skip)
      .def("wait", &Watcher::wait, "seconds"_a)
      .def("know", &Watcher::know, "up"_a, "down"_a, "links"_a);
}
