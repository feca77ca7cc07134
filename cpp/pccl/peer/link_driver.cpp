#include "pccl/peer/link_driver.h"

#include <algorithm>
#include <set>
#include <utility>

#include "pccl/base/overloaded.h"
#include "pccl/topology/plan.h"

namespace pccl::peer {
namespace {

// After the beginning of an epoch, whose plan may need no links on this host.
constexpr Duration kPipePause = std::chrono::seconds(1);

}  // namespace

link::LinkContext LinkDriver::context() const {
  link::LinkContext context;
  context.now = parts_.now;
  context.run = parts_.session.run();
  context.joined = parts_.admission.joined();
  context.member = record() != nullptr;
  context.abort_floor = context.member ? record()->abort_floor : 0;
  context.preparing = parts_.admission.prepare().has_value();
  context.may_report = parts_.session.welcomed();
  context.reducing = parts_.operations.running();
  context.transferring = parts_.sync.transfer().active();
  return context;
}

// -- the links that are needed

// A member needs links to the peers that its plan names, to those that its transfers or
// measurements use, and to newcomers, which may dial it. A newcomer needs links to all members.
std::map<PeerId, link::LinkTarget> LinkDriver::targets() const {
  std::map<PeerId, link::LinkTarget> targets;
  if (const Record& world = record()) {
    std::size_t rank = 0;
    while (rank < world->members.size() && world->members[rank].id != parts_.session.id()) ++rank;
    const auto other_of = [&](std::size_t a, std::size_t b) -> const wire::Member* {
      if (a != rank && b != rank) return nullptr;
      return &world->members[a == rank ? b : a];
    };
    for (const auto& [a, b] : topology::edges(world->plan))
      if (const wire::Member* other = other_of(a, b)) targets[other->id] = {*other, true};
    std::set<PeerId> relayed;
    for (const auto& [a, b] : world->relayed)
      if (const wire::Member* other = other_of(a, b)) relayed.insert(other->id);
    const auto& partners = parts_.sync.transfer().partners();
    const auto is_partner = [&](const PeerId& peer) {
      return std::find(partners.begin(), partners.end(), peer) != partners.end();
    };
    // A link that only a measurement uses gets no relay: it would measure the relay.
    for (auto& [peer, target] : targets) target.may_relay = relayed.contains(peer);
    for (const wire::Member& newcomer : parts_.admission.newcomers())
      targets.try_emplace(newcomer.id, link::LinkTarget{newcomer, true});
    for (const wire::Member& member : world->members) {
      const bool partner = is_partner(member.id);
      if (partner || parts_.measuring.probes(member.id))
        targets.try_emplace(member.id, link::LinkTarget{member, false});
      if (partner && relayed.contains(member.id)) targets.at(member.id).may_relay = true;
    }
  } else if (const auto& prepare = parts_.admission.prepare()) {
    for (const wire::Member& member : prepare->members) targets[member.id] = {member, true};
  }
  return targets;
}

void LinkDriver::choose() {
  std::set<PeerId> members;
  if (const Record& world = record())
    for (const wire::Member& member : world->members) members.insert(member.id);
  links_.want(targets(), members, context());
  handle_links();
  parts_.admission.check_prepared(links_);
  choose_neighbours();
  dial_pipes();
}

void LinkDriver::choose_neighbours() {
  std::vector<wire::Member> near;
  if (const Record& world = record()) {
    near = world->members;
    const std::vector<wire::Member>& newcomers = parts_.admission.newcomers();
    near.insert(near.end(), newcomers.begin(), newcomers.end());
  } else if (const auto& prepare = parts_.admission.prepare()) {
    near = prepare->members;
  }
  parts_.locality.choose(near, parts_.admission.joined(), parts_.now);
  handle_locality();
}

void LinkDriver::dial_pipes() {
  if (closed_) return;
  const auto& partners = parts_.sync.transfer().partners();
  const bool planned_too = !parts_.locality.active() && parts_.now >= pipes_from_;
  if (partners.empty() && !planned_too) return;
  links_.dial_pipes(
      [&](const PeerId& peer, bool planned) {
        const bool wanted = (planned && planned_too) || std::ranges::count(partners, peer) > 0;
        return wanted && parts_.locality.shares_with(peer);
      },
      context());
}

void LinkDriver::close() {
  closed_ = true;
  links_.close_all(context());
}

// -- events of the parts

void LinkDriver::handle_links() {
  for (std::vector<link::LinkEvent> events = links_.take_events(); !events.empty();
       events = links_.take_events()) {
    for (link::LinkEvent& event : events) {
      std::visit(Overloaded{
                     [&](const link::LinkUp& up) { on_link_up(up.peer); },
                     [&](const link::LinkDown& down) { on_link_down(down); },
                     [&](const link::LinkStateReport& report) {
                       parts_.session.report_link(report.peer, report.state, report.reason);
                     },
                     [&](const link::RelayWanted& wanted) {
                       parts_.session.say(wire::WantRelay{wanted.peer, wanted.stripes});
                     },
                     [&](const link::LinkFailed& failed) { on_link_failed(failed); },
                     [&](const link::EagerUnsent& unsent) {
                       parts_.operations.executor().eager_unsent(unsent.peer, unsent.bytes);
                     },
                     [&](const link::AddressTried& tried) {
                       parts_.session.say(wire::Tried{tried.question, tried.reached, tried.reason});
                     },
                     [&](link::LinkNotice& notice) {
                       parts_.actions.note(notice.level, std::move(notice.text));
                     },
                 },
                 event);
    }
  }
}

void LinkDriver::on_link_up(const PeerId& peer) {
  if (closed_) return;
  parts_.admission.check_prepared(links_);
  parts_.measuring.tell_round_trips(parts_.now);
  parts_.sync.transfer().link_up(peer);
  handle_sync();
  dial_pipes();
}

void LinkDriver::on_link_down(const link::LinkDown& down) {
  parts_.sync.transfer().link_down(down.peer, down.unsent);
  handle_sync();
  parts_.operations.executor().reset_link(down.peer);
  parts_.admission.on_link_down();
}

void LinkDriver::on_link_failed(const link::LinkFailed& failed) {
  if (failed.planned) return parts_.admission.check_prepared(links_);
  parts_.sync.transfer().link_failed(failed.peer, failed.reason);
  handle_sync();
}

void LinkDriver::handle_locality() {
  for (LocalityEvent& event : parts_.locality.take_events()) {
    std::visit(
        Overloaded{
            [&](const LocalCommit& commit) { parts_.operations.on_local_commit(commit); },
            [&](const LocalEscalation& escalation) {
              parts_.operations.on_local_escalation(escalation.key, parts_.now);
            },
            [&](wire::Neighbourhood& near) { parts_.session.neighbourhood(std::move(near)); },
            [&](LocalNotice& notice) { parts_.actions.note(notice.level, std::move(notice.text)); },
        },
        event);
  }
}

void LinkDriver::handle_sync() {
  parts_.sync.handle_transfer();
  if (parts_.sync.take_links_changed() && !closed_) choose();
}

void LinkDriver::handle_measuring() {
  if (!parts_.measuring.take_links_changed() || closed_) return;
  choose();
  parts_.measuring.wake_links();
}

// -- events from the master and the shell

void LinkDriver::begin_epoch() {
  pipes_from_ = parts_.now + kPipePause;
  links_.begin_epoch(context());
}

void LinkDriver::on_prepare() {
  begin_epoch();
  links_.forget_failures();
  choose();
}

void LinkDriver::on_relay(const wire::Relay& relay) {
  if (closed_) return;
  links_.on_relay(relay.peer, relay.token, context());
  handle_links();
}

void LinkDriver::on_try(const wire::Try& question) {
  if (closed_) return parts_.session.say(wire::Tried{question.number, false, "too many questions"});
  links_.try_address(question.number, question.address);
  handle_links();
}

void LinkDriver::on_dialled(std::uint64_t token, std::uint64_t stripe, const link::Path& path) {
  links_.on_dialled(token, stripe, path, context());
  handle_links();
}

void LinkDriver::on_dial_failed(std::uint64_t token, const std::string& reason) {
  links_.on_dial_failed(token, reason, context());
  handle_links();
}

void LinkDriver::on_accepted(std::uint64_t stripe, const link::Path& path) {
  if (closed_) {
    parts_.actions.close.push_back(stripe);
    return;
  }
  links_.on_accepted(stripe, path, context());
}

void LinkDriver::on_stripe_failed(std::uint64_t stripe, const Error& error) {
  links_.on_stripe_failed(stripe, error, context());
  handle_links();
}

void LinkDriver::on_neighbour_up(const PeerId& peer) {
  if (closed_) return;
  parts_.locality.on_up(peer, parts_.now);
  handle_locality();
  dial_pipes();
}

void LinkDriver::on_neighbour_down(const PeerId& peer, const std::string& reason) {
  if (closed_) return;
  parts_.locality.on_down(peer, reason, parts_.now);
  handle_locality();
}

void LinkDriver::on_neighbour_offer(const PeerId& peer, memory::Offer what, std::uint64_t number,
                                    const memory::RegionPtr& region) {
  if (closed_) return;
  parts_.locality.on_offered(peer, what, number, region);
  handle_locality();
}

void LinkDriver::on_neighbour_unmapped(const PeerId& peer, memory::Offer what, std::uint64_t number,
                                       const std::string& reason) {
  if (closed_) return;
  parts_.locality.on_unmapped(peer, what, number, reason);
  handle_locality();
}

// -- frames

link::Placement LinkDriver::place(link::Stripe& from, const link::FrameHeader& header) {
  const auto peer = links_.peer_of(from.id());
  if (!peer) {
    link::Placement refused;
    refused.kind = link::Placement::Kind::refuse;
    refused.reason = "data before the handshake";
    return refused;
  }
  if (header.type == link::FrameType::state) return parts_.sync.transfer().place(*peer, header);
  if (header.type == link::FrameType::probe) return {};  // drained
  Operations& operations = parts_.operations;
  link::Placement placement =
      operations.executor().place(*peer, header, operations.was_called(header.key));
  operations.handle_executor(parts_.now);
  if (parts_.tracer.on() && placement.kind == link::Placement::Kind::store)
    parts_.tracer.moved(header.key, *peer, false, 0, parts_.now);
  return placement;
}

Status LinkDriver::arrived(link::Stripe& from, const link::FrameHeader& header, std::uint64_t token,
                           Buffer buffer) {
  const auto peer = links_.peer_of(from.id());
  if (!peer) return {};
  links_.confirm(from);
  parts_.measuring.count(from, parts_.now);
  if (header.type == link::FrameType::state) {
    const Status status = parts_.sync.transfer().arrived(*peer, header, std::move(buffer));
    handle_sync();
    return status;
  }
  if (parts_.tracer.on())
    parts_.tracer.moved(header.key, *peer, false, header.payload_bytes, parts_.now);
  Operations& operations = parts_.operations;
  const Status status = operations.executor().arrived(*peer, header, token, std::move(buffer),
                                                      operations.was_called(header.key));
  operations.handle_executor(parts_.now);
  return status;
}

void LinkDriver::voided(link::Stripe& from, const link::FrameHeader& header, std::uint64_t token) {
  const auto peer = links_.peer_of(from.id());
  if (!peer) return;
  links_.confirm(from);
  if (header.type == link::FrameType::state) return parts_.sync.transfer().voided(*peer, header);
  parts_.operations.executor().voided(*peer, header, token);
}

void LinkDriver::drained(link::Stripe& from, const link::FrameHeader& header) {
  const auto peer = links_.peer_of(from.id());
  if (!peer) return;
  parts_.measuring.count(from, parts_.now);
  if (header.type == link::FrameType::data) parts_.operations.executor().drained(*peer, header);
  links_.confirm(from);
}

void LinkDriver::interrupted(link::Stripe& from, const link::FrameHeader& header,
                             std::uint64_t token) {
  const auto peer = links_.peer_of(from.id());
  if (!peer) return;
  if (header.type == link::FrameType::state) return parts_.sync.transfer().interrupted(header);
  parts_.operations.executor().interrupted(*peer, header, token);
}

Status LinkDriver::control(link::Stripe& from, const link::FrameHeader& header,
                           std::span<const std::uint8_t> payload) {
  const auto done = links_.on_control(from, header, payload, context());
  handle_links();
  if (done) return *done;
  const auto peer = links_.peer_of(from.id());
  if (!peer) return {};
  switch (header.type) {
    case link::FrameType::pong:
      parts_.measuring.on_pong(*peer, header, parts_.operations.running(), parts_.now);
      return {};
    case link::FrameType::probed:
      parts_.measuring.prober().on_probed(*peer, header);
      return {};
    case link::FrameType::fetch:
    case link::FrameType::located: {
      const Status status = parts_.sync.transfer().control(*peer, header, payload);
      handle_sync();
      return status;
    }
    default: {
      Operations& operations = parts_.operations;
      const Status status =
          operations.executor().control(*peer, header, operations.was_called(header.key));
      operations.handle_executor(parts_.now);
      return status;
    }
  }
}

bool LinkDriver::next(link::Stripe& to, link::OutgoingFrame& frame) {
  bool traffic_may = false;
  if (links_.next(to, frame, traffic_may, parts_.now)) return true;
  if (!traffic_may) return false;
  const PeerId peer = *links_.peer_of(to.id());
  measured::Prober& prober = parts_.measuring.prober();
  if (prober.next_word(peer, parts_.now, frame)) return true;
  if (parts_.operations.executor().next(peer, frame)) {
    if (parts_.tracer.on()) {
      const auto header = link::decode(frame.header);
      if (header && header->type == link::FrameType::data)
        parts_.tracer.moved(header->key, peer, true, frame.payload_bytes, parts_.now);
    }
    return true;
  }
  if (parts_.sync.transfer().next(peer, frame)) return true;
  if (!parts_.operations.running() && parts_.measuring.primer().next(peer, to.id(), frame))
    return true;
  // A few stripes are enough to fill the link. The last one stays free for control frames.
  return links_.is_among_first(to.id(), prober.fillers(), 1) &&
         prober.next_filler(peer, parts_.now, frame);
}

}  // namespace pccl::peer
