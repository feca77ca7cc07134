#include "pccl/link/spares.h"

#include <algorithm>
#include <utility>

namespace pccl::link {
namespace {

constexpr Duration kTuneWindow = std::chrono::seconds(1);
// Dials that look for a path: several in each of the first ticks, then one in each, until these
// have failed.
constexpr std::size_t kSearches = 8;
constexpr std::size_t kSeveralTicks = 4;
constexpr std::size_t kMoreSearches = 16;

}  // namespace

void Spares::dial_spares(Link& link) {
  const bool silent = facts_.is_silent(link, link.heard);
  if (link.phase != LinkPhase::up || !link.keeps || facts_.at.joined <= link.peer.joined ||
      (facts_.at.now < link.spares.next && !silent))
    return;
  if (link.relay.used && facts_.at.now >= link.relay_time(facts_.at))
    return dialler_.ask_for_relay(link);
  if (link.dialling.offered) return ask_for_stripes(link);
  if (!link.dialling.answered) return;
  const std::size_t wanted = facts_.connections_wanted(link);
  const auto dial = [&] {
    dialler_.dial(link, *link.dialling.answered, link.spares.next_number++, false);
  };
  if (silent) {
    const std::size_t more = searches(link, wanted);
    link.spares.searches += more;
    for (std::size_t i = 0; i < more; ++i) dial();
    return;
  }
  link.spares.searches = 0;
  while (link.stripes.size() + link.spares.open < wanted) dial();
}

// How many dials look for the path of a silent link in this tick. TCP doubles the time between its
// tries, and its next one may be seconds away when the path works again. New dials find that
// sooner.
std::size_t Spares::searches(const Link& link, std::size_t wanted) const {
  if (link.stripes.size() >= 2 * wanted) return 0;
  // A link begins faster on half of its connections than on one.
  const std::size_t several = std::min((wanted + 1) / 2, kSearches);
  const auto connected =
      std::count_if(facts_.stripes.begin(), facts_.stripes.end(), [&](const auto& item) {
        const StripeEntry& entry = item.second;
        return entry.phase == StripePhase::said_hello && entry.way == Way::network &&
               entry.peer == link.peer.id;
      });
  // If there are connections, the path works, and the peer is frozen.
  const std::size_t first =
      static_cast<std::size_t>(connected) < several ? kSeveralTicks * several : several;
  if (link.spares.searches < first) return several;
  return link.spares.open < first + kMoreSearches ? 1 : 0;
}

void Spares::on_answered(Link& link) {
  if (!facts_.is_silent(link, link.heard)) return;
  link.heard = facts_.at.now;
  dialler_.forget_spares(link);
}

void Spares::end_stalled(Link& link) {
  if (!link.is_up() || !link.keeps || facts_.at.joined >= link.peer.joined) return;
  const Duration interval = facts_.options.settings.heartbeat_interval;
  if (facts_.at.now - facts_.listened > interval || facts_.at.now - facts_.awake_since < interval)
    return;
  Instant newest{};
  for (const std::uint64_t id : link.stripes) {
    const StripeEntry& entry = facts_.stripes.at(id);
    if (entry.way == Way::network) newest = std::max(newest, entry.established);
  }
  const std::vector<std::uint64_t> stripes = link.stripes;
  for (const std::uint64_t id : stripes) {
    const auto it = facts_.stripes.find(id);
    if (it == facts_.stripes.end() || it->second.way == Way::memory) continue;
    // Something has come since the last tick.
    const Stripe& stripe = *it->second.stripe;
    if (stripe.bytes_received() != it->second.marks.heard || stripe.held()) continue;
    if (newest > it->second.heard && facts_.is_silent(link, it->second.heard))
      stand_ins_.lose(id, "it stalled, and a new one works");
  }
}

// As dial_spares, for a link that only the other end can dial.
void Spares::ask_for_stripes(Link& link) {
  if (link.spares.asked > 0 && facts_.at.now >= link.spares.asked_until) {
    link.spares.asked = 0;
    return link.spares.pause_after_failure(facts_.at.now);
  }
  const std::size_t wanted = facts_.connections_wanted(link);
  const std::size_t coming = link.stripes.size() + link.spares.open + link.spares.asked;
  if (coming >= wanted) return;
  const auto more = static_cast<std::uint32_t>(wanted - coming);
  link.spares.asked += more;
  link.spares.asked_until =
      facts_.at.now + facts_.options.settings.link_timeout + kHandshakeTimeout;
  link.standby.push(make_frame({.type = FrameType::wanted, .credit = more}));
  facts_.wake(link.peer.id);
}

Status Spares::on_wanted(Link& link, std::uint32_t count) {
  if (!link.keeps || facts_.at.joined >= link.peer.joined || count > kMaxStripes)
    return refused("connections were asked for that are not due");
  if (!link.is_up() || !link.dialling.answered) return {};
  const std::size_t room =
      kMaxStripes - std::min(kMaxStripes, link.stripes.size() + link.spares.open);
  for (std::size_t i = 0; i < std::min<std::size_t>(count, room); ++i)
    dialler_.dial(link, *link.dialling.answered, 1, true);
  return {};
}

void Spares::tune(Link& link) {
  if (!link.is_up() || !link.keeps || facts_.at.joined <= link.peer.joined) return;
  dial_spares(link);
  Link::Window& window = link.window;
  const bool busy = facts_.at.reducing || facts_.at.transferring;
  window.busy = window.busy && busy;
  window.complete = window.complete && link.stripes.size() == facts_.connections_wanted(link);
  const Duration span = facts_.at.now - window.since;
  if (span < kTuneWindow) return;
  std::uint64_t bytes = 0;
  std::uint64_t least = ~std::uint64_t{0};
  std::uint64_t idlest = 0;
  for (const std::uint64_t id : link.stripes) {
    StripeEntry& entry = facts_.stripes.at(id);
    const std::uint64_t all = entry.stripe->bytes_sent() + entry.stripe->bytes_received();
    const std::uint64_t moved = all - std::exchange(entry.marks.window, all);
    bytes += moved;
    if (moved >= least || entry.way == Way::memory) continue;
    least = moved;
    idlest = id;
  }
  window.tuner.window(bytes, in_seconds(span), window.busy, window.complete);
  window.since = facts_.at.now;
  window.busy = busy;
  window.complete = true;
  if (link.stripes.size() > facts_.connections_wanted(link) && idlest != 0)
    stand_ins_.lose(idlest, "one connection fewer is enough");
  dial_spares(link);
}

}  // namespace pccl::link
