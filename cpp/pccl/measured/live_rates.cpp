#include "pccl/measured/live_rates.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace pccl::measured {
namespace {

// A link with less than this part of all bytes sent counts as unused: control frames, the end of a
// chunk.
constexpr double kUsed = 0.05;
// A rate is reported if it is this much higher, or lower, than the known one.
constexpr double kHigher = 1.15;
constexpr double kLower = 0.7;
// A link without a known rate gets a rate of its own only below this part of the host's up-link.
constexpr double kMuchLess = 0.4;
constexpr unsigned kRoundTrips = 3;
constexpr std::uint32_t kRoundTripNews = 1000;  // microseconds

bool higher(std::uint32_t found, std::uint32_t known) {
  return found > 0 && (known == 0 || found > kHigher * known);
}

std::uint32_t microseconds(Duration time) {
  return static_cast<std::uint32_t>(std::clamp(in_seconds(time) * 1e6, 1.0, 4e9));
}

}  // namespace

wire::Measurements first_round_trips(std::span<const wire::Member> members,
                                     const std::function<Duration(const PeerId&)>& round_trip) {
  wire::Measurements row;
  bool far = false;
  for (const wire::Member& member : members) {
    const Duration seen = round_trip(member.id);
    if (seen == Duration{}) continue;
    row.links.push_back({member.id, {.rtt_us = microseconds(seen)}});
    far = far || row.links.back().rate.rtt_us >= wire::kFarRoundTrip;
  }
  return far ? row : wire::Measurements{};
}

std::uint32_t LiveRates::Count::rate() const {
  if (time <= Duration::zero()) return 0;
  constexpr auto kMost = static_cast<double>(std::numeric_limits<std::uint32_t>::max());
  return static_cast<std::uint32_t>(
      std::min(static_cast<double>(bytes) / 1000 / in_seconds(time), kMost));
}

std::uint32_t LiveRates::Lower::confirmed(std::uint32_t rate, bool lower) {
  const std::uint32_t last = std::exchange(before, lower ? rate : 0);
  return lower && last > 0 ? std::max(last, rate) : 0;
}

void LiveRates::look(std::span<const Way> ways, Duration span) {
  std::uint64_t out = 0;
  std::uint64_t in = 0;
  for (const Way& way : ways) {
    out += way.sent;
    in += way.received;
  }
  out_.add(span, out);
  in_.add(span, in);
  std::size_t used = 0;
  std::size_t used_full = 0;
  std::map<PeerId, bool> are_full;
  const auto was_full = [&](const Way& way) {
    const auto before = were_full_.find(way.peer);
    return way.full && before != were_full_.end() && before->second;
  };
  const auto is_used = [&](const Way& way) {
    return static_cast<double>(way.sent) > kUsed * static_cast<double>(out);
  };
  for (const Way& way : ways) {
    are_full[way.peer] = way.full;
    if (!is_used(way)) continue;
    ++used;
    used_full += was_full(way) ? 1 : 0;
  }
  for (const Way& way : ways) {
    if (was_full(way) && way.sent == 0) {
      Counts& counts = ways_[way.peer];
      for (Count* count : {&counts.beside, &counts.alone, &counts.only, &all_full_})
        count->stalled();
    }
    if (!is_used(way) || !was_full(way)) continue;
    Counts& counts = ways_[way.peer];
    Count& count = used == 1 ? counts.only : used_full == 1 ? counts.alone : counts.beside;
    count.add(span, way.sent);
  }
  if (used > 0 && used_full == used && (used > 1 || ways.size() == 1)) all_full_.add(span, out);
  were_full_ = std::move(are_full);
}

void LiveRates::on_round_trip(const PeerId& peer, Duration rtt) {
  Counts& counts = ways_[peer];
  if (!counts.rtt || rtt < *counts.rtt) counts.rtt = rtt;
  ++counts.round_trips;
}

void LiveRates::on_connection(const PeerId& peer, std::uint32_t rtt_us) {
  ways_[peer].connection = rtt_us;
}

void LiveRates::forget() {
  were_full_.clear();
  ways_.clear();
  all_full_ = out_ = in_ = {};
  lower_ = {};
  said_ = {};
  said_of_.clear();
}

wire::Measurements LiveRates::news(const Known& known, Instant now) {
  wire::Measurements row;
  wire::HostRate host = known.host;
  if (now - said_.at < kSayAgain) {
    const wire::HostRate& said = said_.value;
    if (said.up_kilobytes_per_s > 0) host.up_kilobytes_per_s = said.up_kilobytes_per_s;
    if (said.down_kilobytes_per_s > 0) host.down_kilobytes_per_s = said.down_kilobytes_per_s;
  }
  const auto say_up = [&](std::uint32_t rate) {
    row.total.up_kilobytes_per_s = host.up_kilobytes_per_s = rate;
  };
  if (all_full_.enough()) {
    const std::uint32_t rate = all_full_.rate();
    const bool less = rate < kLower * host.up_kilobytes_per_s;
    const std::uint32_t sure = lower_.confirmed(rate, less);
    if (higher(rate, host.up_kilobytes_per_s)) say_up(rate);
    if (sure > 0) say_up(sure);
    all_full_ = {};
  }
  if (out_.enough()) {
    // The bottleneck may be elsewhere, so these rates are lower bounds. They raise a known rate and
    // never set an unknown one.
    const std::uint32_t out = out_.rate();
    const std::uint32_t in = in_.rate();
    if (host.up_kilobytes_per_s > 0 && out > kHigher * host.up_kilobytes_per_s) say_up(out);
    if (host.down_kilobytes_per_s > 0 && in > kHigher * host.down_kilobytes_per_s)
      row.total.down_kilobytes_per_s = host.down_kilobytes_per_s = in;
    out_ = in_ = {};
  }
  for (auto& [peer, counts] : ways_) {
    wire::LinkRate link = known.link(peer);
    const auto said = said_of_.find(peer);
    if (said != said_of_.end() && now - said->second.at < kSayAgain) link = said->second.value;
    wire::LinkRate report = link;
    report.unreachable = false;
    const std::uint32_t own = link.kilobytes_per_s;
    const std::uint32_t up = host.up_kilobytes_per_s;
    // Slower than the link's known rate; if there is none, much slower than the up-link.
    const auto slower = [&](std::uint32_t rate) {
      return own > 0 ? rate < kLower * own : up == 0 || rate < kMuchLess * up;
    };
    if (counts.alone.enough()) {
      const std::uint32_t rate = counts.alone.rate();
      const std::uint32_t sure = counts.lower.confirmed(rate, slower(rate));
      if (sure > 0) report.kilobytes_per_s = sure;
      if (own > 0 && higher(rate, own)) report.kilobytes_per_s = rate;
      counts.alone = {};
    }
    if (counts.only.enough()) {
      // The only used link of several, as in a ring: it may raise the rate of the up-link.
      const std::uint32_t rate = counts.only.rate();
      if (higher(rate, up)) {
        say_up(rate);
      } else {
        const std::uint32_t sure = counts.lower.confirmed(rate, slower(rate));
        if (sure > 0) report.kilobytes_per_s = sure;
        if (own > 0 && higher(rate, own)) report.kilobytes_per_s = rate;
      }
      counts.only = {};
    }
    if (counts.beside.enough()) {
      if (own > 0 && higher(counts.beside.rate(), own))
        report.kilobytes_per_s = counts.beside.rate();
      counts.beside = {};
    }
    if (counts.round_trips >= kRoundTrips) {
      const std::uint32_t rtt = microseconds(*counts.rtt);
      // Differences below a millisecond are scheduling noise.
      const std::uint32_t off = std::max(rtt, link.rtt_us) - std::min(rtt, link.rtt_us);
      if (link.rtt_us == 0 || (off > kRoundTripNews && off > link.rtt_us / 4)) report.rtt_us = rtt;
      counts.rtt.reset();
      counts.round_trips = 0;
    }
    if (report.rtt_us == 0) report.rtt_us = counts.connection;
    if (report == link || (report.rtt_us == 0 && report.kilobytes_per_s == 0)) continue;
    row.links.push_back({peer, report});
    said_of_[peer] = {report, now};
  }
  if (row.total != wire::HostRate{}) said_ = {host, now};
  return row;
}

}  // namespace pccl::measured
