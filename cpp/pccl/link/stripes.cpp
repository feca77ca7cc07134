// LinkTable: how many stripes a link has, how they stand in for each other, and their frames.
#include <algorithm>
#include <utility>

#include "pccl/link/links.h"

namespace pccl::link {
namespace {

// Pause after spares that failed. It doubles each time.
constexpr Duration kSpareDialPause = std::chrono::milliseconds(500);
constexpr Duration kMostSpareDialPause = std::chrono::seconds(30);
constexpr Duration kTuneWindow = std::chrono::seconds(1);

}  // namespace

// -- how many

// Without the pipe; within this peer's budget.
std::uint32_t LinkTable::stripes_wanted(const Link& link) const {
  const auto sharing =
      static_cast<std::uint32_t>(std::count_if(links_.begin(), links_.end(), [](const auto& item) {
        return item.second.is_up() && item.second.keeps;
      }));
  const std::uint32_t share = options_.stripe_budget / std::max(1U, sharing);
  return std::min(link.window.tuner.wanted(), std::max(1U, share));
}

std::size_t LinkTable::connections_wanted(const Link& link) const {
  return stripes_wanted(link) + (link.pipe == Pipe::up ? 1U : 0U);
}

// Spares that were dialled together count as one failure.
void LinkTable::pause_spares(Link& link) {
  if (at_.now < link.spares.next) return;
  link.spares.pause = std::clamp(link.spares.pause * 2, kSpareDialPause, kMostSpareDialPause);
  link.spares.next = at_.now + link.spares.pause;
}

// Dials the stripes that are missing, and replaces those that have ended.
void LinkTable::dial_spares(Link& link) {
  if (link.phase != LinkPhase::up || !link.keeps || at_.joined <= link.peer.joined ||
      at_.now < link.spares.next)
    return;
  if (link.relay.used && at_.now >= relay_time(link, at_)) return ask_for_relay(link);
  if (link.dialling.offered) return ask_for_stripes(link);
  if (!link.dialling.answered) return;
  const std::size_t wanted = connections_wanted(link);
  while (link.stripes.size() + link.spares.open < wanted)
    dial(link, *link.dialling.answered, link.spares.next_number++, false);
}

// As dial_spares, for a link that only the other end can dial.
void LinkTable::ask_for_stripes(Link& link) {
  if (link.spares.asked > 0 && at_.now >= link.spares.asked_until) {
    link.spares.asked = 0;
    return pause_spares(link);
  }
  const std::size_t wanted = connections_wanted(link);
  const std::size_t coming = link.stripes.size() + link.spares.open + link.spares.asked;
  if (coming >= wanted) return;
  FrameHeader header;
  header.type = FrameType::wanted;
  header.credit = static_cast<std::uint32_t>(wanted - coming);
  link.spares.asked += header.credit;
  link.spares.asked_until = at_.now + options_.settings.link_timeout + kHandshakeTimeout;
  link.standby.push(make_frame(header));
  wake(link.peer.id);
}

Status LinkTable::on_wanted(Link& link, std::uint32_t count) {
  if (!link.keeps || at_.joined >= link.peer.joined || count > kMaxStripes)
    return refused("connections were asked for that are not due");
  if (!link.is_up() || !link.dialling.answered) return {};
  const std::size_t room =
      kMaxStripes - std::min(kMaxStripes, link.stripes.size() + link.spares.open);
  for (std::size_t i = 0; i < std::min<std::size_t>(count, room); ++i)
    dial(link, *link.dialling.answered, 1, true);
  return {};
}

// Measures the link's rate with its present stripes, and changes their number.
void LinkTable::tune(Link& link) {
  if (!link.is_up() || !link.keeps || at_.joined <= link.peer.joined) return;
  dial_spares(link);
  Window& window = link.window;
  const bool busy = at_.reducing || at_.transferring;
  window.busy = window.busy && busy;
  window.complete = window.complete && link.stripes.size() == connections_wanted(link);
  const Duration span = at_.now - window.since;
  if (span < kTuneWindow) return;
  std::uint64_t bytes = 0;
  std::uint64_t least = ~std::uint64_t{0};
  std::uint64_t idlest = 0;
  for (const std::uint64_t id : link.stripes) {
    Entry& entry = stripes_.at(id);
    const std::uint64_t all = entry.stripe->bytes_sent() + entry.stripe->bytes_received();
    const std::uint64_t moved = all - std::exchange(entry.marks.window, all);
    bytes += moved;
    if (moved >= least || entry.way == Way::memory) continue;
    least = moved;
    idlest = id;
  }
  window.tuner.window(bytes, std::chrono::duration<double>(span).count(), window.busy,
                      window.complete);
  window.since = at_.now;
  window.busy = busy;
  window.complete = true;
  if (link.stripes.size() > connections_wanted(link) && idlest != 0)
    lose(idlest, "one connection fewer is enough");
  dial_spares(link);
}

// -- their ends

void LinkTable::on_stripe_failed(std::uint64_t id, const Error& error, const LinkContext& context) {
  at_ = context;
  const auto it = stripes_.find(id);
  if (it == stripes_.end()) return;
  Entry& entry = it->second;
  const bool established = entry.phase == StripePhase::established;
  if (!established && !entry.offered_to.empty()) {
    const auto offered = links_.find(entry.offered_to);
    if (offered != links_.end()) note_failure(offered->second, entry.address, error.reason);
    return close(id);
  }
  const auto found = links_.find(entry.peer);
  if (found == links_.end()) return close(id);
  Link& link = found->second;
  if (!established) return fail_handshake(entry, link, error.reason);
  if (error.code == Code::refused) {
    log(LogLevel::debug, "link to " + entry.peer.brief() + " broke: " + error.reason);
    return take_down(link, error.reason, link.planned);
  }
  log(LogLevel::debug, "a connection to " + entry.peer.brief() + " broke: " + error.reason);
  lose(id, error.reason);
}

// Ends a stripe. If the link keeps frames and other stripes are up, they send the frames again.
// Otherwise the link goes down.
void LinkTable::lose(std::uint64_t id, const std::string& reason) {
  Entry& entry = stripes_.at(id);
  Link& link = links_.at(entry.peer);
  const bool others = std::any_of(
      link.stripes.begin(), link.stripes.end(),
      [&](std::uint64_t other) { return other != id && stripes_.at(other).way != Way::memory; });
  if (!link.keeps || entry.way == Way::memory || !others)
    return take_down(link, reason, link.planned);
  if (link.standby.too_many_unsettled())
    return take_down(link, "too many lost connections", link.planned);
  const Lost notice{link.generation, entry.hello.stripe, entry.stripe->frames_received()};
  LeftFrames left = entry.stripe->end();
  ++stand_ins_;
  std::erase(link.stripes, id);
  close(id);
  link.standby.lose(notice, std::move(left), at_.now);
  wake(link.peer.id);
  // The next tick dials another one. Not now: the other stripes may be ending too.
}

void LinkTable::tell_lost(Link& link, std::uint32_t number, std::uint64_t received) {
  link.standby.tell({link.generation, number, received});
  wake(link.peer.id);
}

Status LinkTable::on_lost(const PeerId& from, std::span<const std::uint8_t> payload) {
  Lost lost;
  wire::Reader reader(payload);
  reader(lost);
  if (!reader.complete()) return refused("a malformed notice of a lost connection");
  const auto found = links_.find(from);
  if (found == links_.end() || !found->second.keeps || lost.generation != found->second.generation)
    return {};
  Link& link = found->second;
  if (link.standby.too_many_notices()) return refused("too many notices of lost connections");
  const auto up = std::find_if(link.stripes.begin(), link.stripes.end(), [&](std::uint64_t id) {
    const Entry& entry = stripes_.at(id);
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
  if (settled->eager_unsent > 0) events_.emplace_back(EagerUnsent{from, settled->eager_unsent});
  wake(from);
  return {};
}

// The stripe is not up here and must never come up: its dial or its hello may still be in progress.
// Stripe 0 may have several handshakes, one for each address. It was up, since the link is up.
Status LinkTable::lost_before_it_was_up(Link& link, const Lost& lost) {
  // No check if the other end dials: it may have dialled many stripes that never arrived here.
  if (at_.joined > link.peer.joined && lost.stripe >= link.spares.next_number)
    return refused("a notice of a connection that never was");
  if (link.standby.too_many_ended()) return refused("too many lost connections");
  (void)link.standby.note_ended(lost.stripe);
  const auto half_open = std::find_if(stripes_.begin(), stripes_.end(), [&](const auto& item) {
    const Entry& entry = item.second;
    return entry.phase == StripePhase::said_hello && entry.peer == link.peer.id &&
           entry.way != Way::memory && entry.hello.stripe == lost.stripe &&
           entry.hello.generation == link.generation;
  });
  if (half_open != stripes_.end()) {
    if (link.spares.open > 0) --link.spares.open;
    close(half_open->first);
  }
  tell_lost(link, lost.stripe, 0);
  return {};
}

// -- their frames

void LinkTable::confirm(Stripe& stripe) {
  if (!stripe.owes_confirmation() || this->stripe(stripe.id()) != &stripe) return;
  stripe.push_heartbeat();
  flush_.insert(stripe.id());
}

std::optional<Status> LinkTable::on_control(Stripe& from, const FrameHeader& header,
                                            std::span<const std::uint8_t> payload,
                                            const LinkContext& context) {
  at_ = context;
  const auto it = stripes_.find(from.id());
  if (it == stripes_.end()) return Status{};
  Entry& entry = it->second;
  switch (header.type) {
    case FrameType::hello:
    case FrameType::welcome:
    case FrameType::refused:
    case FrameType::offer:
      return on_greeting(entry, header, payload);
    default:
      break;
  }
  if (entry.phase != StripePhase::established) return refused("frames before the handshake");
  if (header.type == FrameType::heartbeat)
    return from.confirm(header.attempt) ? Status{}
                                        : refused("more frames were confirmed than were sent");
  const PeerId peer = entry.peer;  // a copy: a notice may end this stripe
  if (header.type == FrameType::lost) return on_lost(peer, payload);
  confirm(from);
  if (header.type == FrameType::wanted) {
    const auto link = links_.find(peer);
    return link == links_.end() ? refused("connections were asked for that are not due")
                                : on_wanted(link->second, header.credit);
  }
  if (header.type != FrameType::ping) return std::nullopt;
  entry.pong = header.attempt;  // only the latest ping is answered
  flush_.insert(from.id());
  return Status{};
}

bool LinkTable::next(Stripe& to, OutgoingFrame& frame, bool& traffic_may, Instant now) {
  traffic_may = false;
  const auto it = stripes_.find(to.id());
  if (it == stripes_.end() || it->second.phase != StripePhase::established) return false;
  Entry& entry = it->second;
  const auto found = links_.find(entry.peer);
  if (found == links_.end()) return false;
  Link& link = found->second;
  if (const auto asked = std::exchange(entry.pong, {})) {
    FrameHeader answer;
    answer.type = FrameType::pong;
    answer.attempt = *asked;
    frame = make_frame(answer);
    return true;
  }
  const bool memory = entry.way == Way::memory;
  if (!memory && link.standby.next(frame)) return true;
  // All data goes through the pipe, which is faster than the other stripes.
  if (link.pipe == Pipe::up && !memory) return false;
  if (std::exchange(link.ping_due, false)) {
    FrameHeader ping;
    ping.type = FrameType::ping;
    ping.attempt = static_cast<std::uint64_t>(now.time_since_epoch().count());
    frame = make_frame(ping);
    link.pinged = now;
    return true;
  }
  traffic_may = true;
  return false;
}

void LinkTable::ping(const PeerId& peer) {
  const auto it = links_.find(peer);
  if (it == links_.end()) return;
  it->second.ping_due = true;
  wake(peer);
}

std::optional<Duration> LinkTable::on_pong(const PeerId& peer, const FrameHeader& header,
                                           Instant now) {
  const auto it = links_.find(peer);
  if (it == links_.end() || !it->second.pinged) return std::nullopt;
  const Instant asked{Instant::duration(static_cast<Instant::rep>(header.attempt))};
  if (asked != *it->second.pinged) return std::nullopt;
  it->second.pinged.reset();
  return now - asked;
}

// -- bytes moved

std::vector<LinkFlow> LinkTable::flows() {
  std::vector<LinkFlow> flows;
  for (auto& [peer, link] : links_) {
    LinkFlow flow{peer, 0, 0, false, false};
    bool local = false;
    std::size_t waiting = 0;
    for (const std::uint64_t id : link.stripes) {
      Entry& entry = stripes_.at(id);
      const std::uint64_t sent = entry.stripe->bytes_sent();
      const std::uint64_t received = entry.stripe->bytes_received();
      flow.sent += sent - std::exchange(entry.marks.flow_sent, sent);
      flow.received += received - std::exchange(entry.marks.flow_received, received);
      waiting += entry.stripe->idle() ? 0 : 1;
      local = local || entry.local;
    }
    // A single stripe of many may only wait for a lost packet. A few may hold all that is queued.
    flow.full = waiting > 0 && 8 * waiting >= link.stripes.size();
    flow.network = link.is_up() && link.planned && link.pipe != Pipe::up && link.member && !local;
    flows.push_back(flow);
  }
  return flows;
}

std::uint64_t LinkTable::moved_since_last() {
  std::uint64_t moved = 0;
  for (auto& [id, entry] : stripes_) {
    const std::uint64_t bytes = entry.stripe->bytes_received() + entry.stripe->bytes_sent();
    if (entry.phase == StripePhase::established) moved += bytes - entry.marks.moved;
    entry.marks.moved = bytes;
  }
  return moved;
}

void LinkTable::begin_probe() {
  for (auto& [id, entry] : stripes_) entry.marks.probe = entry.stripe->bytes_received();
}

std::uint64_t LinkTable::received_since_probe(std::uint64_t id) {
  const auto it = stripes_.find(id);
  if (it == stripes_.end() || it->second.way == Way::memory) return 0;
  const std::uint64_t all = it->second.stripe->bytes_received();
  return all - std::exchange(it->second.marks.probe, all);
}

}  // namespace pccl::link
