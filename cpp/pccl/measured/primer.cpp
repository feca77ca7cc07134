#include "pccl/measured/primer.h"

#include "pccl/measured/filler.h"

namespace pccl::measured {

void Primer::begin(std::span<const Way> ways, Instant expected) {
  links_.clear();
  for (const Way& way : ways) {
    if (way.round_trip < kShortest || way.window == 0 || way.most == 0) continue;
    Link& link = links_[way.peer];
    link.way = way;
    link.due = expected - kLead * way.round_trip;
  }
  expected_ = expected;
}

bool Primer::filling(Instant now) const {
  return std::ranges::any_of(links_, [now](const auto& item) {
    const Link& link = item.second;
    return now + 2 * link.way.round_trip + kPause >= link.due;
  });
}

bool Primer::on_time(Instant now) {
  if (!active()) return false;
  if (now >= expected_ + kLate) {
    end();
    return false;
  }
  bool filled = false;
  for (auto& [peer, link] : links_) {
    if (now < link.due) continue;
    // In slow start a window grows by what is confirmed. More would only fill queues until they
    // drop packets.
    link.left = std::min(link.way.window, link.way.most);
    link.way.most -= link.left;
    link.taken.clear();
    // The first portion takes some round trips. A second one beside it would be too much.
    const Duration round_trip = link.way.round_trip;
    link.due = link.started ? now + round_trip + kPause
                            : std::max(expected_, now + kLead * round_trip) + kPause / 2;
    link.started = true;
    filled = true;
  }
  return filled;
}

Instant Primer::next_deadline() const {
  if (!active()) return Instant::max();
  Instant next = expected_ + kLate;
  for (const auto& [peer, link] : links_) next = std::min(next, link.due);
  return next;
}

bool Primer::next(const PeerId& to, std::uint64_t stripe, link::OutgoingFrame& frame) {
  const auto it = links_.find(to);
  if (it == links_.end() || it->second.left == 0) return false;
  Link& link = it->second;
  // Each connection has to find its rate. The first ones could take all.
  std::uint64_t& taken = link.taken[stripe];
  if (taken >= link.way.window / link.way.stripes && taken > 0) return false;
  const auto bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(kFillerBytes, link.left));
  taken += bytes;
  link.left -= bytes;
  frame = filler_frame(bytes);
  return true;
}

}  // namespace pccl::measured
