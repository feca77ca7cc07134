#include "pccl/measured/prober.h"

#include <algorithm>
#include <limits>

#include "pccl/measured/filler.h"

namespace pccl::measured {
namespace {

// A link gets a rate of its own only if it carries less than this part of its share.
constexpr double kMuchLess = 0.4;

std::uint32_t clipped(double value) {
  constexpr auto kMost = static_cast<double>(std::numeric_limits<std::uint32_t>::max());
  return static_cast<std::uint32_t>(std::clamp(value, 0.0, kMost));
}

}  // namespace

void Prober::begin(const std::vector<PeerId>& peers, std::uint64_t most_bytes, Instant now) {
  ways_.clear();
  for (const PeerId& peer : peers) {
    ways_[peer].ping_due = true;
    ways_[peer].left = most_bytes;
  }
  began_ = now;
  next_ = now + kPingEvery;
  counted_ = false;
}

void Prober::keep(const std::vector<wire::Member>& members) {
  std::erase_if(ways_, [&](const auto& item) {
    return std::none_of(members.begin(), members.end(),
                        [&](const wire::Member& member) { return member.id == item.first; });
  });
}

std::uint32_t Prober::rate_of(std::uint64_t bytes) {
  return clipped(static_cast<double>(bytes) / 1000 / in_seconds(kCounted - kCount));
}

bool Prober::on_time(Instant now) {
  if (!active() || now < next_) return false;
  const Duration age = now - began_;
  if (age < kFill) {
    for (auto& [peer, way] : ways_) way.ping_due = true;
    next_ = now + std::min(kPingEvery, kFill - age);
    return true;
  }
  if (!counted_ && age >= kCounted) {
    counted_ = true;
    for (auto& [peer, way] : ways_) way.word_due = true;
  }
  next_ = began_ + (age < kCounted ? kCounted : age < kOver ? kOver : age + kPingEvery);
  return true;
}

bool Prober::over(Instant now) const {
  const Duration age = now - began_;
  if (ways_.empty() || age >= kOver) return true;
  return age >= kFilled && std::all_of(ways_.begin(), ways_.end(), [](const auto& item) {
           return item.second.sent_rate.has_value();
         });
}

bool Prober::next_word(const PeerId& to, Instant now, link::OutgoingFrame& frame) {
  const auto it = ways_.find(to);
  if (it == ways_.end()) return false;
  Way& way = it->second;
  link::FrameHeader header;
  if (way.ping_due) {
    way.ping_due = false;
    header.type = link::FrameType::ping;
    header.attempt = static_cast<std::uint64_t>(now.time_since_epoch().count());
  } else if (way.word_due) {
    way.word_due = false;
    std::uint64_t down = 0;
    std::uint32_t senders = 0;
    for (const auto& [peer, other] : ways_) {
      down += rate_of(other.received);
      senders += other.received > 0 ? 1 : 0;
    }
    header.type = link::FrameType::probed;
    header.credit = rate_of(way.received);
    header.attempt = down;
    header.segment = senders;
  } else {
    return false;
  }
  frame = link::make_frame(header);
  return true;
}

bool Prober::next_filler(const PeerId& to, Instant now, link::OutgoingFrame& frame) {
  const auto it = ways_.find(to);
  if (it == ways_.end() || it->second.left == 0 || now < began_ + kFill || now >= began_ + kFilled)
    return false;
  const auto bytes =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(kFillerBytes, it->second.left));
  it->second.left -= bytes;
  frame = filler_frame(bytes);
  return true;
}

void Prober::on_pong(const PeerId& from, const link::FrameHeader& header, Instant now) {
  const auto it = ways_.find(from);
  const Instant asked{Instant::duration(static_cast<Instant::rep>(header.attempt))};
  if (it == ways_.end() || asked < began_ || asked > now) return;
  const Duration rtt = now - asked;
  if (!it->second.rtt || rtt < *it->second.rtt) it->second.rtt = rtt;
}

void Prober::on_bytes(const PeerId& from, std::uint64_t bytes, Instant now) {
  const auto it = ways_.find(from);
  if (it == ways_.end()) return;
  it->second.heard = it->second.heard || bytes > 0;
  if (now >= began_ + kCount && now < began_ + kCounted) it->second.received += bytes;
}

bool Prober::answered(const PeerId& peer) const {
  const auto it = ways_.find(peer);
  return it != ways_.end() && (it->second.heard || it->second.rtt || it->second.sent_rate);
}

void Prober::on_probed(const PeerId& from, const link::FrameHeader& header) {
  const auto it = ways_.find(from);
  if (it == ways_.end()) return;
  it->second.sent_rate = header.credit;
  it->second.its_down = header.attempt;
  it->second.its_senders = header.segment;
}

wire::Measurements Prober::row() const {
  wire::Measurements row;
  double up = 0;
  double down = 0;
  double weights = 0;  // of connections that share a link, short round trips get more of it
  std::size_t answers = 0;
  for (const auto& [peer, way] : ways_) {
    down += rate_of(way.received);
    if (!way.sent_rate) continue;
    ++answers;
    up += *way.sent_rate;
    if (way.rtt) weights += 1 / std::max(in_seconds(*way.rtt), 1e-4);
  }
  row.total = {clipped(up), clipped(down)};
  for (const auto& [peer, way] : ways_) {
    wire::MeasuredLink link{peer, {}};
    if (way.rtt) link.rate.rtt_us = clipped(in_seconds(*way.rtt) * 1e6);
    link.rate.together_kilobytes_per_s = way.sent_rate.value_or(0);
    if (way.sent_rate && way.rtt && *way.sent_rate > 0 && answers > 1 && way.its_senders > 0) {
      const double weight = 1 / std::max(in_seconds(*way.rtt), 1e-4) / weights;
      const double even = up / static_cast<double>(answers);
      const double received = static_cast<double>(way.its_down) / way.its_senders;
      if (*way.sent_rate < kMuchLess * std::min({up * weight, even, received}))
        link.rate.kilobytes_per_s = *way.sent_rate;
    }
    if (link.rate != wire::LinkRate{}) row.links.push_back(link);
  }
  return row;
}

}  // namespace pccl::measured
