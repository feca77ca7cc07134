#include "pccl/measured/warm_up.h"

#include "pccl/measured/filler.h"

namespace pccl::measured {

void WarmUp::begin(std::span<const Way> ways, Instant expected) {
  links_.clear();
  for (const Way& way : ways) {
    if (way.round_trip < kShortest || way.window == 0 || way.most == 0) continue;
    Link& link = links_[way.peer];
    link.round_trip = way.round_trip;
    link.window = way.window;
    link.most = way.most;
    link.due = expected - kLead * way.round_trip;
  }
  until_ = expected + kLate;
}

bool WarmUp::on_time(Instant now) {
  if (!active()) return false;
  if (now >= until_) {
    end();
    return false;
  }
  bool filled = false;
  for (auto& [peer, link] : links_) {
    if (now < link.due) continue;
    // In slow start a window grows by what is confirmed. More would only fill queues until they
    // drop packets.
    link.left = std::min(link.window, link.most);
    link.most -= link.left;
    link.due = now + link.round_trip + kPause;
    filled = true;
  }
  return filled;
}

Instant WarmUp::next_deadline() const {
  if (!active()) return Instant::max();
  Instant next = until_;
  for (const auto& [peer, link] : links_) next = std::min(next, link.due);
  return next;
}

bool WarmUp::next(const PeerId& to, link::OutgoingFrame& frame) {
  const auto it = links_.find(to);
  if (it == links_.end() || it->second.left == 0) return false;
  const auto bytes =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(kFillerBytes, it->second.left));
  it->second.left -= bytes;
  frame = filler_frame(bytes);
  return true;
}

}  // namespace pccl::measured
