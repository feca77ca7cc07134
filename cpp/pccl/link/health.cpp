// LinkTable: heartbeats, silence, and links that cannot be established.
#include <algorithm>
#include <utility>

#include "pccl/link/links.h"

namespace pccl::link {
namespace {

constexpr std::size_t kMaxUnconfirmed = 65536;  // frames of one stripe

}  // namespace

void LinkTable::on_tick(const LinkContext& context) {
  at_ = context;
  for (auto& [peer, link] : links_) tune(link);
  std::vector<std::uint64_t> late;
  for (const auto& [id, entry] : stripes_)
    if (entry.phase != StripePhase::established && at_.now >= entry.deadline) late.push_back(id);
  for (const std::uint64_t id : late)
    on_stripe_failed(id, {Code::unreachable, "no handshake in time", {}, {}}, context);
}

void LinkTable::on_watch(const LinkContext& context) {
  at_ = context;
  const Duration linger = options_.settings.heartbeat_timeout;
  for (auto it = links_.begin(); it != links_.end();) {
    Link& link = it->second;
    if (link.phase == LinkPhase::lingering && at_.now - link.unwanted_since >= linger)
      take_down(link, "not needed any more", false);
    it = link.phase == LinkPhase::ended ? links_.erase(it) : std::next(it);
  }
  for (auto& [peer, link] : links_) {
    if (link.is_up()) {
      watch_up(link);
    } else {
      watch_connecting(link);
    }
  }
}

void LinkTable::watch_connecting(Link& link) {
  const bool overdue = link.is_wanted() &&
                       at_.now - link.down_since >= options_.settings.link_timeout &&
                       (link.member || at_.preparing);
  if (!overdue) return;
  std::string& why = link.dialling.failure;
  if (why.empty()) why = "no connection came about";
  if (link.planned) {
    if (link.told) return;
    link.told = wire::LinkState::unreachable;
    events_.emplace_back(LinkStateReport{link.peer.id, wire::LinkState::unreachable, why});
    if (at_.preparing) {
      // The master may ignore the report while it waits for a silent member: report again later.
      link.told.reset();
      link.down_since = at_.now;
      link.failed = true;
    }
  }
  if (!link.planned || at_.preparing)
    events_.emplace_back(LinkFailed{link.peer.id, link.planned, why});
}

void LinkTable::watch_up(Link& link) {
  const Settings& settings = options_.settings;
  const bool heard = hear(link);
  if (heard) link.heard = at_.now;
  if (heard && link.told) {
    link.told.reset();
    events_.emplace_back(LinkStateReport{
        link.peer.id, link.relay.used ? wire::LinkState::relayed : wire::LinkState::mended,
        "it is heard again"});
  }
  if (at_.now - link.heard >= settings.heartbeat_timeout) {
    if (!link.planned) {
      // No operation depends on the link; a new connection may work.
      return take_down(link, "nothing heard on the link", false);
    }
    if (!link.told && link.member) {
      link.told = wire::LinkState::silent;
      events_.emplace_back(
          LinkStateReport{link.peer.id, wire::LinkState::silent, "nothing heard on the link"});
    }
  } else {
    // One stripe may die while the others live, without an error at either end. An idle stripe
    // receives a heartbeat at least every other interval.
    const Duration patience = link.keeps
                                  ? std::max(settings.link_timeout, 4 * settings.heartbeat_interval)
                                  : settings.heartbeat_timeout;
    const std::vector<std::uint64_t> stripes = link.stripes;
    for (const std::uint64_t id : stripes) {
      const auto it = stripes_.find(id);
      if (it == stripes_.end() || link.heard - it->second.heard < patience) continue;
      const std::string why = "nothing heard on one of the link's connections";
      log(LogLevel::debug, "a connection to " + link.peer.id.brief() + " broke: " + why);
      lose(id, why);
    }
  }
  const char* const fault = link.is_up() ? fault_of(link) : nullptr;
  if (fault != nullptr) take_down(link, fault, link.planned);
}

// Queues heartbeats on stripes that sent nothing since the last call. Returns whether any stripe
// received bytes or is held.
bool LinkTable::hear(Link& link) {
  bool heard = false;
  for (const std::uint64_t id : link.stripes) {
    Entry& entry = stripes_.at(id);
    Stripe& stripe = *entry.stripe;
    if (!stripe.held()) {
      entry.held_since.reset();
    } else if (!entry.held_since) {
      entry.held_since = at_.now;
    }
    if (stripe.bytes_received() != entry.marks.heard || stripe.held()) {
      entry.marks.heard = stripe.bytes_received();
      entry.heard = at_.now;
      heard = true;
    }
    if (stripe.bytes_sent() == entry.marks.sent && stripe.idle()) {
      stripe.push_heartbeat();
      flush_.insert(id);
    }
    entry.marks.sent = stripe.bytes_sent();
  }
  return heard;
}

// Describes a fault that has lasted longer than it can with an honest peer. Null: no fault.
const char* LinkTable::fault_of(const Link& link) const {
  const Settings& settings = options_.settings;
  const char* const untold = "the other end does not say what has come";
  if (link.standby.overdue(at_.now, settings.link_timeout + settings.heartbeat_timeout))
    return untold;
  // By then the control connection works again, or this peer is out of the run.
  const Duration catch_up = settings.reconnect_timeout + settings.heartbeat_timeout;
  for (const std::uint64_t id : link.stripes) {
    const Entry& entry = stripes_.at(id);
    if (entry.stripe->unconfirmed() > kMaxUnconfirmed) return untold;
    if (entry.held_since && at_.now - *entry.held_since >= catch_up)
      return "it sends data of an epoch that does not come";
  }
  return nullptr;
}

}  // namespace pccl::link
