#include "pccl/link/link_facts.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "pccl/base/text.h"
#include "pccl/wire/address.h"

namespace pccl::link {
namespace {

constexpr std::array<LinkTransition, 8> kTransitions = {{
    {LinkPhase::ended, LinkPhase::connecting, "it is needed"},
    {LinkPhase::connecting, LinkPhase::up, "its first handshake is over"},
    {LinkPhase::up, LinkPhase::connecting, "its last stripe is gone"},
    {LinkPhase::up, LinkPhase::lingering, "it is not needed any more"},
    {LinkPhase::lingering, LinkPhase::up, "it is needed again"},
    {LinkPhase::lingering, LinkPhase::ended, "its last stripe is gone, or its time is over"},
    {LinkPhase::connecting, LinkPhase::ended, "it is not needed any more"},
    {LinkPhase::ended, LinkPhase::lingering, "the other end brought it about"},
}};

// The older peer of a pair dials, too, if the newer one has not connected by then.
constexpr Duration kOfferAfter = std::chrono::milliseconds(500);
// Pause after spares that failed. It doubles each time.
constexpr Duration kSpareDialPause = std::chrono::milliseconds(500);
constexpr Duration kMostSpareDialPause = std::chrono::seconds(30);

// An idle stripe receives a heartbeat every interval, seen at the next tick.
constexpr int kSilentIntervals = 2;

}  // namespace

const char* name(LinkPhase phase) {
  constexpr std::array<const char*, kLinkPhases> kNames = {"connecting", "up", "lingering",
                                                           "ended"};
  return kNames[static_cast<std::size_t>(phase)];
}

std::span<const LinkTransition> link_transitions() { return kTransitions; }

void Link::note_failure(const wire::Address& address, const std::string& reason) {
  dialling.failure = address.host.empty() ? reason : failure_at(wire::to_string(address), reason);
}

Instant Link::dial_time(const LinkContext& context) const {
  const std::uint64_t joined = context.joined;
  if (phase != LinkPhase::connecting || joined == peer.joined || joined == 0) return Instant::max();
  const bool waits = joined < peer.joined && !dialling.offered;
  return waits ? std::max(dialling.next, down_since + kOfferAfter) : dialling.next;
}

// The newer peer, which sends the hello, requests relays.
Instant Link::relay_time(const LinkContext& context) const {
  const bool asks =
      relay.allowed && is_wanted() && context.joined > peer.joined && context.may_report;
  return asks ? relay.next : Instant::max();
}

void Link::Spares::pause_after_failure(Instant now) {
  if (now < next) return;
  pause = std::clamp(pause * 2, kSpareDialPause, kMostSpareDialPause);
  next = now + pause;
}

void LinkFacts::move(Link& link, LinkPhase to) {
  static_assert(kTransitions.size() == std::tuple_size_v<decltype(taken)>);
  for (std::size_t i = 0; i < kTransitions.size(); ++i) {
    if (kTransitions[i].from != link.phase || kTransitions[i].to != to) continue;
    ++taken[i];
    link.phase = to;
    return;
  }
  assert(false && "an illegal change of a link's phase");
  link.phase = to;
}

void LinkFacts::log(LogLevel level, std::string text) {
  events.emplace_back(LinkNotice{level, std::move(text)});
}

void LinkFacts::take_down(Link& link, const std::string& reason, bool report) {
  const bool was_up = link.is_up();
  if (was_up) {
    move(link, link.phase == LinkPhase::up ? LinkPhase::connecting : LinkPhase::ended);
    LinkDown down{link.peer.id, {}};
    link.standby.add_unsent(down.unsent);
    for (const std::uint64_t id : link.stripes) stripes.at(id).stripe->add_unsent(down.unsent);
    events.emplace_back(std::move(down));
  }
  const std::vector<std::uint64_t> established = std::exchange(link.stripes, {});
  for (const std::uint64_t id : established) close(id);
  // Dials in progress belong to the old generation. on_dialled closes their connections.
  std::erase_if(dials, [&](const auto& item) {
    return item.second.question == 0 && item.second.peer == link.peer.id;
  });
  std::vector<std::uint64_t> half_open;
  for (const auto& [id, entry] : stripes)
    if (entry.phase == StripePhase::said_hello && entry.peer == link.peer.id)
      half_open.push_back(id);
  for (const std::uint64_t id : half_open) close(id);
  link.ended_generation = std::max(link.ended_generation, link.generation);
  link.standby = {};
  link.keeps = link.relay.used = false;
  link.pipe = Link::Pipe::none;
  link.dialling.open = link.spares.open = link.spares.asked = 0;
  link.dialling.renews = false;
  link.dialling.tried = 0;
  link.dialling.next = at.now;
  link.dialling.failure = reason;
  link.spares.pause = {};
  link.ping_due = false;
  link.pinged.reset();
  link.round_trip = {};
  link.down_since = at.now;
  link.reported.reset();
  if (!was_up || !report) return;
  if (at.member) link.broke_under = at.abort_floor;
  events.emplace_back(LinkStateReport{link.peer.id, wire::LinkState::broken, reason});
}

void LinkFacts::close(std::uint64_t id) {
  const auto it = stripes.find(id);
  if (it == stripes.end()) return;
  end_offer(it->second);
  actions.close.push_back(id);
  closed.push_back(std::move(it->second));
  stripes.erase(it);
  flush.erase(id);
}

void LinkFacts::end_offer(StripeEntry& entry) {
  if (entry.offered_to.empty() || entry.phase == StripePhase::established) return;
  const auto it = links.find(entry.offered_to);
  if (it == links.end()) return;
  std::uint32_t& open = it->second.open_dials(entry.offered_number);
  if (open > 0) --open;
}

void LinkFacts::wake(const PeerId& peer) {
  const auto it = links.find(peer);
  if (it == links.end() || !it->second.is_up()) return;
  flush.insert(it->second.stripes.begin(), it->second.stripes.end());
}

bool LinkFacts::is_silent(const Link& link, Instant heard) const {
  const Duration interval = std::max(options.settings.heartbeat_interval, link.their_interval);
  return at.now - heard >= kSilentIntervals * interval;
}

void LinkFacts::pause_spares(Link& link) const {
  if (!is_silent(link, link.heard)) link.spares.pause_after_failure(at.now);
}

std::uint32_t LinkFacts::stripes_wanted(const Link& link) const {
  const auto sharing =
      static_cast<std::uint32_t>(std::count_if(links.begin(), links.end(), [](const auto& item) {
        return item.second.is_up() && item.second.keeps;
      }));
  const std::uint32_t share = options.stripe_budget / std::max(1U, sharing);
  return std::min(link.window.tuner.wanted(), std::max(1U, share));
}

std::size_t LinkFacts::connections_wanted(const Link& link) const {
  return stripes_wanted(link) + (link.pipe == Link::Pipe::up ? 1U : 0U);
}

}  // namespace pccl::link
