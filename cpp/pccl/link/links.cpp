#include "pccl/link/links.h"

#include <algorithm>
#include <utility>

namespace pccl::link {

void LinkTable::want(const std::map<PeerId, LinkTarget>& targets, const std::set<PeerId>& members,
                     const LinkContext& context) {
  facts_.at = context;
  for (auto it = facts_.links.begin(); it != facts_.links.end();) {
    Link& link = it->second;
    const bool member = members.contains(it->first);
    const bool was_member = std::exchange(link.member, member);
    if (targets.contains(it->first)) {
      ++it;
    } else if (link.is_up() && (member || !was_member)) {
      // The next plan may need the link again, and the other end may have that plan already.
      if (link.phase == LinkPhase::up) {
        facts_.move(link, LinkPhase::lingering);
        link.unwanted_since = facts_.at.now;
      }
      link.planned = false;
      ++it;
    } else {
      facts_.take_down(link, "not needed any more", false);
      if (link.phase == LinkPhase::connecting) facts_.move(link, LinkPhase::ended);
      it = facts_.links.erase(it);
    }
  }
  for (const auto& [peer, target] : targets) {
    const auto [it, fresh] = facts_.links.try_emplace(peer);
    Link& link = it->second;
    link.peer = target.peer;
    link.planned = target.planned;
    // The relay has as long as the dials had.
    if (target.may_relay && !link.relay.allowed && !link.is_up()) link.down_since = facts_.at.now;
    link.relay.allowed = target.may_relay;
    if (fresh) {
      ++facts_.taken[kNewLink];
      link.member = members.contains(peer);
      link.down_since = link.dialling.next = facts_.at.now;
    } else if (link.phase == LinkPhase::lingering) {
      facts_.move(link, LinkPhase::up);
    } else if (link.phase == LinkPhase::ended) {
      facts_.move(link, LinkPhase::connecting);
    }
  }
  // Hellos that arrived before the epoch that names their sender.
  std::vector<std::uint64_t> parked;
  for (const auto& [id, entry] : facts_.stripes)
    if (entry.phase == StripePhase::parked && facts_.links.contains(entry.hello.from))
      parked.push_back(id);
  for (const std::uint64_t id : parked) {
    const auto it = facts_.stripes.find(id);
    if (it != facts_.stripes.end()) handshakes_.accept(it->second);
  }
}

void LinkTable::begin_epoch(const LinkContext& context) {
  facts_.at = context;
  for (auto& [peer, link] : facts_.links) {
    link.reported.reset();
    // Epochs that follow each other quickly do not hide a link that is missing all the time.
    const bool was_needed = link.planned && (link.member || facts_.at.preparing);
    if (!link.is_up() && !was_needed) link.down_since = facts_.at.now;
  }
}

void LinkTable::forget_failures() {
  for (auto& [peer, link] : facts_.links) link.failed = false;
}

void LinkTable::excuse_silence(Instant now) {
  for (auto& [peer, link] : facts_.links) link.heard = now;
  for (auto& [id, entry] : facts_.stripes) {
    entry.heard = now;
    entry.held_since.reset();
  }
}

void LinkTable::close_all(const LinkContext& context) {
  facts_.at = context;
  while (!facts_.stripes.empty()) facts_.close(facts_.stripes.begin()->first);
  facts_.links.clear();
  facts_.dials.clear();
}

void LinkTable::on_stripe_failed(std::uint64_t id, const Error& error, const LinkContext& context) {
  facts_.at = context;
  const auto it = facts_.stripes.find(id);
  if (it == facts_.stripes.end()) return;
  StripeEntry& entry = it->second;
  const bool established = entry.phase == StripePhase::established;
  if (!established && !entry.offered_to.empty()) {
    const auto offered = facts_.links.find(entry.offered_to);
    if (offered != facts_.links.end()) offered->second.note_failure(entry.address, error.reason);
    return facts_.close(id);
  }
  const auto found = facts_.links.find(entry.peer);
  if (found == facts_.links.end()) return facts_.close(id);
  Link& link = found->second;
  if (!established) return handshakes_.fail_handshake(entry, link, error.reason);
  const std::string name = wire::shown_name(link.peer.name, link.peer.id, true);
  if (error.code == Code::refused) {
    facts_.log(LogLevel::debug, "link to " + name + " broke: " + error.reason);
    return facts_.take_down(link, error.reason, link.planned);
  }
  facts_.log(LogLevel::debug, "a connection to " + name + " broke: " + error.reason);
  stand_ins_.lose(id, error.reason);
}

std::optional<Status> LinkTable::on_control(Stripe& from, const FrameHeader& header,
                                            std::span<const std::uint8_t> payload,
                                            const LinkContext& context) {
  facts_.at = context;
  const auto it = facts_.stripes.find(from.id());
  if (it == facts_.stripes.end()) return Status{};
  StripeEntry& entry = it->second;
  switch (header.type) {
    case FrameType::hello:
    case FrameType::welcome:
    case FrameType::refused:
    case FrameType::offer:
      return handshakes_.on_greeting(entry, header, payload);
    default:
      break;
  }
  if (entry.phase != StripePhase::established) return refused("frames before the handshake");
  if (header.type == FrameType::heartbeat)
    return from.confirm(header.attempt) ? Status{}
                                        : refused("more frames were confirmed than were sent");
  const PeerId peer = entry.peer;  // a copy: a notice may end this stripe
  if (header.type == FrameType::lost) return stand_ins_.on_lost(peer, payload);
  confirm(from);
  if (header.type == FrameType::wanted) {
    const auto link = facts_.links.find(peer);
    return link == facts_.links.end() ? refused("connections were asked for that are not due")
                                      : spares_.on_wanted(link->second, header.credit);
  }
  if (header.type != FrameType::ping) return std::nullopt;
  entry.pong = header.attempt;  // only the latest ping is answered
  facts_.flush.insert(from.id());
  return Status{};
}

bool LinkTable::next(Stripe& to, OutgoingFrame& frame, bool& traffic_may, Instant now) {
  traffic_may = false;
  const auto it = facts_.stripes.find(to.id());
  if (it == facts_.stripes.end() || it->second.phase != StripePhase::established) return false;
  StripeEntry& entry = it->second;
  const auto found = facts_.links.find(entry.peer);
  if (found == facts_.links.end()) return false;
  Link& link = found->second;
  if (const auto asked = std::exchange(entry.pong, {})) {
    frame = make_frame({.type = FrameType::pong, .attempt = *asked});
    return true;
  }
  const bool memory = entry.way == Way::memory;
  if (!memory && link.standby.next(frame)) return true;
  // All data goes through the pipe, which is faster than the other stripes.
  if (link.pipe == Link::Pipe::up && !memory) return false;
  if (std::exchange(link.ping_due, false)) {
    const auto clock = static_cast<std::uint64_t>(now.time_since_epoch().count());
    frame = make_frame({.type = FrameType::ping, .attempt = clock});
    link.pinged = now;
    return true;
  }
  traffic_may = true;
  return false;
}

void LinkTable::confirm(Stripe& stripe) {
  if (!stripe.owes_confirmation() || this->stripe(stripe.id()) != &stripe) return;
  stripe.push_heartbeat();
  facts_.flush.insert(stripe.id());
}

void LinkTable::ping(const PeerId& peer) {
  const auto it = facts_.links.find(peer);
  if (it == facts_.links.end()) return;
  it->second.ping_due = true;
  facts_.wake(peer);
}

Duration LinkTable::round_trip(const PeerId& peer) const {
  const auto it = facts_.links.find(peer);
  return it == facts_.links.end() ? Duration{} : it->second.round_trip;
}

void LinkTable::saw_round_trip(const PeerId& peer, Duration round_trip) {
  const auto it = facts_.links.find(peer);
  if (it != facts_.links.end()) it->second.note_round_trip(round_trip);
}

std::optional<Duration> LinkTable::on_pong(const PeerId& peer, const FrameHeader& header,
                                           Instant now) {
  const auto it = facts_.links.find(peer);
  if (it == facts_.links.end() || !it->second.pinged) return std::nullopt;
  const Instant asked{Instant::duration(static_cast<Instant::rep>(header.attempt))};
  if (asked != *it->second.pinged) return std::nullopt;
  it->second.pinged.reset();
  return now - asked;
}

void LinkTable::on_time(const LinkContext& context) {
  facts_.at = context;
  dialler_.dial_due();
}

void LinkTable::on_tick(const LinkContext& context) {
  facts_.at = context;
  health_.listen();
  for (auto& [peer, link] : facts_.links) {
    spares_.end_stalled(link);
    spares_.tune(link);
  }
  std::vector<std::uint64_t> late;
  for (const auto& [id, entry] : facts_.stripes)
    if (entry.phase != StripePhase::established && facts_.at.now >= entry.deadline)
      late.push_back(id);
  for (const std::uint64_t id : late)
    on_stripe_failed(id, {Code::unreachable, "no handshake in time"}, context);
}

bool LinkTable::is_up(const PeerId& peer) const {
  const auto it = facts_.links.find(peer);
  return it != facts_.links.end() && it->second.is_up();
}

bool LinkTable::is_checked(const PeerId& peer) const {
  const auto it = facts_.links.find(peer);
  return it != facts_.links.end() && it->second.checked;
}

bool LinkTable::has_failed(const PeerId& peer) const {
  const auto it = facts_.links.find(peer);
  return it != facts_.links.end() && it->second.failed && !it->second.is_up();
}

bool LinkTable::never_worked(const PeerId& peer, const LinkContext& context) const {
  const auto it = facts_.links.find(peer);
  if (it == facts_.links.end()) return false;
  const Link& link = it->second;
  return !link.is_up() && link.ended_generation == 0 && !link.planned &&
         context.joined > link.peer.joined;
}

std::vector<LinkStateReport> LinkTable::report_all(const LinkContext& context) const {
  std::vector<LinkStateReport> reports;
  for (const auto& [peer, link] : facts_.links) {
    if (!link.planned) continue;
    const std::string& why = link.dialling.failure;
    // A link that broke may be up again, but the bytes that were in flight are lost.
    if (link.broke_under == context.abort_floor)
      reports.push_back({peer, wire::LinkState::broken, why});
    if (link.reported) reports.push_back({peer, *link.reported, why});
    if (link.is_up())
      reports.push_back(
          {peer, link.relay.used ? wire::LinkState::relayed : wire::LinkState::mended, "it works"});
  }
  return reports;
}

Stripe* LinkTable::stripe(std::uint64_t id) {
  const auto it = facts_.stripes.find(id);
  return it == facts_.stripes.end() ? nullptr : it->second.stripe.get();
}

std::optional<PeerId> LinkTable::peer_of(std::uint64_t id) const {
  const auto it = facts_.stripes.find(id);
  if (it == facts_.stripes.end() || it->second.phase != StripePhase::established) return {};
  return it->second.peer;
}

std::vector<std::pair<PeerId, std::size_t>> LinkTable::stripes_by_peer() const {
  std::vector<std::pair<PeerId, std::size_t>> counts;
  for (const auto& [peer, link] : facts_.links)
    if (link.is_up()) counts.emplace_back(peer, link.stripes.size());
  return counts;
}

std::size_t LinkTable::local_peers() const {
  const auto local = [&](std::uint64_t id) { return facts_.stripes.at(id).local; };
  return static_cast<std::size_t>(
      std::count_if(facts_.links.begin(), facts_.links.end(), [&](const auto& item) {
        const std::vector<std::uint64_t>& stripes = item.second.stripes;
        return std::any_of(stripes.begin(), stripes.end(), local);
      }));
}

std::vector<std::uint64_t> LinkTable::held_stripes() const {
  std::vector<std::uint64_t> held;
  for (const auto& [id, entry] : facts_.stripes)
    if (entry.stripe->held()) held.push_back(id);
  return held;
}

bool LinkTable::is_among_first(std::uint64_t id, std::size_t count, std::size_t spare) const {
  const auto peer = peer_of(id);
  const auto it = peer ? facts_.links.find(*peer) : facts_.links.end();
  if (it == facts_.links.end()) return false;
  const std::vector<std::uint64_t>& stripes = it->second.stripes;
  const std::size_t most = stripes.size() > spare ? stripes.size() - spare : stripes.size();
  const auto end = stripes.begin() + static_cast<std::ptrdiff_t>(std::min(count, most));
  return std::find(stripes.begin(), end, id) != end;
}

std::vector<LinkFlow> LinkTable::flows() {
  std::vector<LinkFlow> flows;
  for (auto& [peer, link] : facts_.links) {
    LinkFlow flow{peer, 0, 0, false, false};
    bool local = false;
    std::size_t waiting = 0;
    for (const std::uint64_t id : link.stripes) {
      StripeEntry& entry = facts_.stripes.at(id);
      const std::uint64_t sent = entry.stripe->bytes_sent();
      const std::uint64_t received = entry.stripe->bytes_received();
      flow.sent += sent - std::exchange(entry.marks.flow_sent, sent);
      flow.received += received - std::exchange(entry.marks.flow_received, received);
      waiting += entry.stripe->idle() ? 0 : 1;
      local = local || entry.local;
    }
    // A single stripe of many may only wait for a lost packet. A few may hold all that is queued.
    flow.full = waiting > 0 && 8 * waiting >= link.stripes.size();
    flow.network =
        link.is_up() && link.planned && link.pipe != Link::Pipe::up && link.member && !local;
    flows.push_back(flow);
  }
  return flows;
}

std::uint64_t LinkTable::moved_since_last() {
  std::uint64_t moved = 0;
  for (auto& [id, entry] : facts_.stripes) {
    const std::uint64_t bytes = entry.stripe->bytes_received() + entry.stripe->bytes_sent();
    if (entry.phase == StripePhase::established) moved += bytes - entry.marks.moved;
    entry.marks.moved = bytes;
  }
  return moved;
}

void LinkTable::begin_probe() {
  for (auto& [id, entry] : facts_.stripes) entry.marks.probe = entry.stripe->bytes_received();
}

std::uint64_t LinkTable::received_since_probe(std::uint64_t id) {
  const auto it = facts_.stripes.find(id);
  if (it == facts_.stripes.end() || it->second.way == Way::memory) return 0;
  const std::uint64_t all = it->second.stripe->bytes_received();
  return all - std::exchange(it->second.marks.probe, all);
}

std::uint64_t LinkTable::release(const PeerId& peer, std::uint64_t token) {
  const auto it = facts_.links.find(peer);
  if (it == facts_.links.end()) return 0;
  std::uint64_t dropped = it->second.standby.release(token);
  for (const std::uint64_t id : it->second.stripes)
    dropped += facts_.stripes.at(id).stripe->release(token);
  return dropped;
}

std::uint64_t LinkTable::unsent(const PeerId& peer, std::uint64_t token) const {
  const auto it = facts_.links.find(peer);
  if (it == facts_.links.end()) return 0;
  std::uint64_t bytes = it->second.standby.unsent(token);
  for (const std::uint64_t id : it->second.stripes)
    bytes += facts_.stripes.at(id).stripe->unsent(token);
  return bytes;
}

bool LinkTable::has_actions() const {
  const LinkActions& actions = facts_.actions;
  return !facts_.closed.empty() || !facts_.flush.empty() || !actions.dials.empty() ||
         !actions.flush.empty() || !actions.close.empty();
}

LinkActions LinkTable::take_actions() {
  facts_.closed.clear();
  LinkActions actions = std::exchange(facts_.actions, {});
  actions.flush.assign(facts_.flush.begin(), facts_.flush.end());
  facts_.flush.clear();
  return actions;
}

}  // namespace pccl::link
