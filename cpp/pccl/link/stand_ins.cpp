#include "pccl/link/stand_ins.h"

#include <algorithm>
#include <utility>

namespace pccl::link {

void StandIns::lose(std::uint64_t id, const std::string& reason) {
  StripeEntry& entry = facts_.stripes.at(id);
  Link& link = facts_.links.at(entry.peer);
  const bool others =
      std::any_of(link.stripes.begin(), link.stripes.end(), [&](std::uint64_t other) {
        return other != id && facts_.stripes.at(other).way != Way::memory;
      });
  if (!link.keeps || entry.way == Way::memory || !others)
    return facts_.take_down(link, reason, link.planned);
  if (link.standby.too_many_unsettled())
    return facts_.take_down(link, "too many lost connections", link.planned);
  const Lost notice{link.generation, entry.hello.stripe, entry.stripe->frames_received()};
  LeftFrames left = entry.stripe->end();
  ++stand_ins_;
  std::erase(link.stripes, id);
  facts_.close(id);
  link.standby.lose(notice, std::move(left), facts_.at.now);
  facts_.wake(link.peer.id);
  // The next tick dials another one. Not now: the other stripes may be ending too.
}

void StandIns::tell_lost(Link& link, std::uint32_t number, std::uint64_t received) {
  link.standby.tell({link.generation, number, received});
  facts_.wake(link.peer.id);
}

Status StandIns::on_lost(const PeerId& from, std::span<const std::uint8_t> payload) {
  Lost lost;
  wire::Reader reader(payload);
  reader(lost);
  if (!reader.complete()) return refused("a malformed notice of a lost connection");
  const auto found = facts_.links.find(from);
  if (found == facts_.links.end() || !found->second.keeps ||
      lost.generation != found->second.generation)
    return {};
  Link& link = found->second;
  if (link.standby.too_many_notices()) return refused("too many notices of lost connections");
  const auto up = std::find_if(link.stripes.begin(), link.stripes.end(), [&](std::uint64_t id) {
    const StripeEntry& entry = facts_.stripes.at(id);
    return entry.way != Way::memory && entry.hello.stripe == lost.stripe &&
           entry.hello.generation == link.generation;
  });
  if (up != link.stripes.end()) {
    lose(*up, "the other end has lost it");
    if (!link.is_up()) return {};
  } else if (!link.standby.has_ended(lost.stripe)) {
    if (const Status status = lost_before_it_was_up(link, lost); !status) return status;
  }
  const auto settled = link.standby.settle(lost);
  if (!settled) return settled.error();
  sent_again_ += settled->sent_again;
  if (settled->eager_unsent > 0)
    facts_.events.emplace_back(EagerUnsent{from, settled->eager_unsent});
  facts_.wake(from);
  return {};
}

// The stripe is not up here and must never come up: its dial or its hello may still be in progress.
// Stripe 0 may have several handshakes, one for each address. It was up, since the link is up.
Status StandIns::lost_before_it_was_up(Link& link, const Lost& lost) {
  // No check if the other end dials: it may have dialled many stripes that never arrived here.
  if (facts_.at.joined > link.peer.joined && lost.stripe >= link.spares.next_number)
    return refused("a notice of a connection that never was");
  if (link.standby.too_many_ended()) return refused("too many lost connections");
  (void)link.standby.note_ended(lost.stripe);
  const auto half_open =
      std::find_if(facts_.stripes.begin(), facts_.stripes.end(), [&](const auto& item) {
        const StripeEntry& entry = item.second;
        return entry.phase == StripePhase::said_hello && entry.peer == link.peer.id &&
               entry.way != Way::memory && entry.hello.stripe == lost.stripe &&
               entry.hello.generation == link.generation;
      });
  if (half_open != facts_.stripes.end()) {
    if (link.spares.open > 0) --link.spares.open;
    facts_.close(half_open->first);
  }
  tell_lost(link, lost.stripe, 0);
  return {};
}

}  // namespace pccl::link
