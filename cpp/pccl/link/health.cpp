#include "pccl/link/health.h"

#include <algorithm>
#include <utility>

namespace pccl::link {
namespace {

constexpr std::size_t kMaxUnconfirmed = 65536;  // frames of one stripe

}  // namespace

void Health::on_watch(const LinkContext& context) {
  facts_.at = context;
  const Duration linger = facts_.options.settings.heartbeat_timeout;
  for (auto it = facts_.links.begin(); it != facts_.links.end();) {
    Link& link = it->second;
    if (link.phase == LinkPhase::lingering && facts_.at.now - link.unwanted_since >= linger)
      facts_.take_down(link, "not needed any more", false);
    it = link.phase == LinkPhase::ended ? facts_.links.erase(it) : std::next(it);
  }
  for (auto& [peer, link] : facts_.links) {
    if (link.is_up()) {
      watch_up(link);
    } else {
      watch_connecting(link);
    }
  }
}

void Health::watch_connecting(Link& link) {
  const bool overdue = link.is_wanted() &&
                       facts_.at.now - link.down_since >= facts_.options.settings.link_timeout &&
                       (link.member || facts_.at.preparing);
  if (!overdue) return;
  std::string& why = link.dialling.failure;
  if (why.empty()) why = "no connection came about";
  if (link.planned) {
    if (link.reported) return;
    link.reported = wire::LinkState::unreachable;
    facts_.events.emplace_back(LinkStateReport{link.peer.id, wire::LinkState::unreachable, why});
    if (facts_.at.preparing) {
      // The master may ignore the report while it waits for a silent member: report again later.
      link.reported.reset();
      link.down_since = facts_.at.now;
      link.failed = true;
    }
  }
  if (!link.planned || facts_.at.preparing)
    facts_.events.emplace_back(LinkFailed{link.peer.id, link.planned, why});
}

void Health::watch_up(Link& link) {
  const Settings& settings = facts_.options.settings;
  if (facts_.at.now - link.heard >= settings.heartbeat_timeout) {
    // Something on the path may have forgotten the connections, and new ones may work. If the other
    // end is frozen, their handshakes do not end.
    const std::string why = "nothing heard on the link";
    const bool report = link.planned && link.member;
    facts_.take_down(link, why, report);
    if (report) {
      link.reported = wire::LinkState::silent;
      facts_.events.emplace_back(LinkStateReport{link.peer.id, wire::LinkState::silent, why});
    }
    return;
  }
  // One stripe may die while the others live, without an error at either end. An idle stripe
  // receives a heartbeat every interval.
  const Duration patience = link.keeps
                                ? std::max(settings.link_timeout, 4 * settings.heartbeat_interval)
                                : settings.heartbeat_timeout;
  const std::vector<std::uint64_t> stripes = link.stripes;
  for (const std::uint64_t id : stripes) {
    const auto it = facts_.stripes.find(id);
    if (it == facts_.stripes.end() || link.heard - it->second.heard < patience) continue;
    const std::string why = "nothing heard on one of the link's connections";
    facts_.log(LogLevel::debug, "a connection to " +
                                    wire::shown_name(link.peer.name, link.peer.id, true) +
                                    " broke: " + why);
    stand_ins_.lose(id, why);
  }
  const char* const fault = link.is_up() ? fault_of(link) : nullptr;
  if (fault != nullptr) facts_.take_down(link, fault, link.planned);
}

void Health::listen() {
  const Instant before = std::exchange(facts_.listened, facts_.at.now);
  if (facts_.at.now - before > facts_.options.settings.heartbeat_interval)
    facts_.awake_since = facts_.at.now;
  for (auto& [peer, link] : facts_.links)
    if (link.is_up()) listen(link);
}

void Health::listen(Link& link) {
  bool heard = false;
  for (const std::uint64_t id : link.stripes) {
    StripeEntry& entry = facts_.stripes.at(id);
    Stripe& stripe = *entry.stripe;
    if (!stripe.held()) {
      entry.held_since.reset();
    } else if (!entry.held_since) {
      entry.held_since = facts_.at.now;
    }
    if (stripe.bytes_received() != entry.marks.heard || stripe.held()) {
      entry.marks.heard = stripe.bytes_received();
      entry.heard = facts_.at.now;
      heard = true;
    }
    const std::uint64_t sent = stripe.bytes_sent();
    if (std::exchange(entry.marks.sent, sent) != sent || !stripe.idle())
      entry.spoke = facts_.at.now;
    if (facts_.at.now - entry.spoke >= facts_.options.settings.heartbeat_interval) {
      stripe.push_heartbeat();
      facts_.flush.insert(id);
      entry.spoke = facts_.at.now;
      entry.marks.sent += kFrameHeaderBytes;  // the heartbeat's own
    }
  }
  if (heard) link.heard = facts_.at.now;
}

// Describes a fault that has lasted longer than it can with an honest peer. Null: no fault.
const char* Health::fault_of(const Link& link) const {
  const Settings& settings = facts_.options.settings;
  const char* const untold = "the other end does not say what has come";
  if (link.standby.overdue(facts_.at.now, settings.link_timeout + settings.heartbeat_timeout))
    return untold;
  // By then the control connection works again, or this peer is out of the run.
  const Duration catch_up = settings.reconnect_timeout + settings.heartbeat_timeout;
  for (const std::uint64_t id : link.stripes) {
    const StripeEntry& entry = facts_.stripes.at(id);
    if (entry.stripe->unconfirmed() > kMaxUnconfirmed) return untold;
    if (entry.held_since && facts_.at.now - *entry.held_since >= catch_up)
      return "it sends data of an epoch that does not come";
  }
  return nullptr;
}

}  // namespace pccl::link
