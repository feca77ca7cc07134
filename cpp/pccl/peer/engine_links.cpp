// The engine's links to other peers: which are needed, what their changes mean for the session and
// the transfers, and the frames that move through them.
#include <algorithm>
#include <utility>

#include "pccl/peer/engine.h"
#include "pccl/topology/plan.h"
#include "pccl/topology/rates.h"

namespace pccl::peer {
namespace {

constexpr Duration kPingEvery = std::chrono::seconds(5);  // of planned links at rest

template <class... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

}  // namespace

// ---- links
// --------------------------------------------------------------------------------------------------------

link::LinkContext Engine::link_context() const {
  link::LinkContext context;
  context.now = now_;
  context.run = session_.run();
  context.joined = joined_;
  context.member = record() != nullptr;
  context.abort_floor = context.member ? record()->abort_floor : 0;
  context.preparing = prepare_.has_value();
  context.may_report = session_.welcomed();
  context.reducing = executor_.operation_count() > 0;
  context.transferring = transfer_.active();
  return context;
}

// A member needs links to the peers that its plan names, to those that its transfers or
// measurements use, and to newcomers, which may dial it. A newcomer needs links to all members.
std::map<PeerId, link::LinkTarget> Engine::link_targets() const {
  std::map<PeerId, link::LinkTarget> targets;
  if (const Record& world = record()) {
    std::size_t rank = 0;
    while (rank < world->members.size() && world->members[rank].id != id()) ++rank;
    const auto other_of = [&](std::size_t a, std::size_t b) -> const wire::Member* {
      if (a != rank && b != rank) return nullptr;
      return &world->members[a == rank ? b : a];
    };
    for (const auto& [a, b] : topology::edges(world->plan))
      if (const wire::Member* other = other_of(a, b)) targets[other->id] = {*other, true};
    std::set<PeerId> relayed;
    for (const auto& [a, b] : world->relayed)
      if (const wire::Member* other = other_of(a, b)) relayed.insert(other->id);
    const auto& partners = transfer_.partners();
    const auto is_partner = [&](const PeerId& peer) {
      return std::find(partners.begin(), partners.end(), peer) != partners.end();
    };
    // Ways that nothing uses are not worth measuring: no relay for them.
    for (auto& [peer, target] : targets) target.may_relay = relayed.contains(peer);
    for (const wire::Member& newcomer : expected_)
      targets.try_emplace(newcomer.id, link::LinkTarget{newcomer, true});
    for (const wire::Member& member : world->members) {
      const bool partner = is_partner(member.id);
      if (partner || (optimizing_ && optimizing_->probed.contains(member.id)))
        targets.try_emplace(member.id, link::LinkTarget{member, false});
      if (partner && relayed.contains(member.id)) targets.at(member.id).may_relay = true;
    }
  } else if (prepare_) {
    for (const wire::Member& member : prepare_->members) targets[member.id] = {member, true};
  }
  return targets;
}

void Engine::choose_links() {
  std::set<PeerId> members;
  if (const Record& world = record())
    for (const wire::Member& member : world->members) members.insert(member.id);
  links_.want(link_targets(), members, link_context());
  links_told();
  check_prepared();
  choose_neighbours();
  dial_pipes();
}

void Engine::choose_neighbours() {
  std::vector<wire::Member> near;
  if (const Record& world = record()) {
    near = world->members;
    near.insert(near.end(), expected_.begin(), expected_.end());
  } else if (prepare_) {
    near = prepare_->members;
  }
  locality_.choose(near, joined_, now_);
  locality_told();
}

void Engine::dial_pipes() {
  if (out_ || locality_.active()) return;
  links_.dial_pipes([&](const PeerId& peer) { return locality_.shares_with(peer); },
                    link_context());
}

void Engine::links_told() {
  for (std::vector<link::LinkEvent> events = links_.take_events(); !events.empty();
       events = links_.take_events()) {
    for (link::LinkEvent& event : events) {
      std::visit(Overloaded{
                     [&](const link::LinkUp& up) { on_link_up(up.peer); },
                     [&](const link::LinkDown& down) { on_link_down(down); },
                     [&](const link::LinkReport& report) {
                       session_.report_link(report.peer, report.state, report.reason);
                     },
                     [&](const link::RelayWanted& wanted) {
                       session_.want_relay(wanted.peer, wanted.stripes);
                     },
                     [&](const link::LinkFailed& failed) { on_link_failed(failed); },
                     [&](const link::EagerUnsent& unsent) {
                       executor_.eager_unsent(unsent.peer, unsent.bytes);
                     },
                     [&](const link::AddressTried& tried) {
                       session_.tried(tried.question, tried.reached, tried.reason);
                     },
                     [&](link::LinkNotice& notice) { log(notice.level, std::move(notice.text)); },
                 },
                 event);
    }
  }
}

void Engine::on_link_up(const PeerId& peer) {
  if (out_) return;
  check_prepared();
  transfer_.link_up(peer);
  transfer_told();
  dial_pipes();
}

void Engine::on_link_down(const link::LinkDown& down) {
  transfer_.link_down(down.peer, down.unsent);
  transfer_told();
  executor_.reset_link(down.peer);
  if (prepare_) prepared_epoch_ = 0;
}

void Engine::on_link_failed(const link::LinkFailed& failed) {
  if (failed.planned) {
    check_prepared();
  } else {
    transfer_.give_up(failed.peer, failed.reason);
    transfer_told();
  }
}

void Engine::on_prepare(const wire::Prepare& prepare) {
  if (out_ || session_.member() || !asked_) return;  // or it gave up waiting meanwhile
  prepare_ = prepare;
  links_.begin_epoch(link_context());
  links_.forget_failures();
  choose_links();
}

void Engine::on_expect(const wire::Expect& expect) {
  if (out_) return;
  expected_ = expect.newcomers;
  locality_.newcomers_wait(expect.ready);
  choose_links();
}

void Engine::check_prepared() {
  if (session_.member() || !prepare_) return;
  std::vector<PeerId> without;
  for (const wire::Member& member : prepare_->members) {
    if (!links_.contains(member.id)) return;
    if (links_.is_up(member.id)) continue;
    if (!links_.has_failed(member.id)) return;
    without.push_back(member.id);
  }
  // With some missing it is said again and again: the master may have waited for another report of
  // theirs.
  if (prepared_epoch_ == prepare_->epoch && without.empty() && prepared_without_.empty()) return;
  prepared_epoch_ = prepare_->epoch;
  prepared_without_ = without;
  session_.prepared(prepare_->epoch, without);
}

void Engine::on_relay(const wire::Relay& relay) {
  if (out_) return;
  links_.on_relay(relay.peer, relay.token, link_context());
  links_told();
}

void Engine::on_try(const wire::Try& question) {
  if (out_) return session_.tried(question.number, false, "too many questions");
  links_.try_address(question.number, question.address);
  links_told();
}

void Engine::on_dialled(std::uint64_t token, std::uint64_t stripe, bool local, Instant now,
                        bool memory) {
  now_ = now;
  links_.on_dialled(token, stripe, local, memory ? link::Way::memory : link::Way::network,
                    link_context());
  links_told();
}

void Engine::on_dial_failed(std::uint64_t token, const std::string& reason, Instant now) {
  now_ = now;
  links_.on_dial_failed(token, reason, link_context());
  links_told();
}

void Engine::on_accepted(std::uint64_t stripe, bool local, Instant now, const PeerId& neighbour) {
  now_ = now;
  if (out_) {
    actions_.close.push_back(stripe);
    return;
  }
  links_.on_accepted(stripe, local, neighbour, link_context());
}

void Engine::on_stripe_failed(std::uint64_t stripe, const Error& error, Instant now) {
  now_ = now;
  links_.on_stripe_failed(stripe, error, link_context());
  links_told();
}

// ---- what transfers show of the ways

// Watches links to other hosts that the plan uses while operations move on them; between
// operations, round trips.
void Engine::watch_rates() {
  const Duration span = now_ - std::exchange(rates_looked_, now_);
  const bool busy = executor_.operation_count() > 0;
  // A look that came late may mean that this whole process paused.
  const bool in_time = span <= options_.settings.heartbeat_interval / 2;
  const bool counts = std::exchange(rates_busy_, busy) && busy && in_time && !prober_.active();
  const bool pings = !busy && !prober_.active() && now_ >= next_pings_;
  if (pings) next_pings_ = now_ + kPingEvery;
  std::vector<measured::LiveRates::Way> ways;
  for (const link::LinkFlow& flow : links_.flows()) {
    if (!flow.network || locality_.shares_with(flow.peer)) continue;
    ways.push_back({flow.peer, flow.sent, flow.received, flow.full});
    if (pings) links_.ping(flow.peer);
  }
  if (!counts || ways.empty()) return live_rates_.skip();
  live_rates_.look(ways, span);
  tell_rates();
}

void Engine::on_pong(const PeerId& peer, const link::FrameHeader& header) {
  const auto round_trip = links_.on_pong(peer, header, now_);
  // An answer that met an operation may have waited for it.
  const bool waited = executor_.operation_count() > 0 || prober_.active();
  if (!round_trip || waited || !session_.member()) return;
  live_rates_.on_round_trip(peer, *round_trip);
  tell_rates();
}

void Engine::tell_rates() {
  const Record& world = record();
  if (!world || !session_.member()) return;
  const std::size_t n = world->members.size();
  if (n > topology::kMaxTable) return;
  std::size_t mine = 0;
  std::map<PeerId, std::size_t> ranks;
  for (std::size_t rank = 0; rank < n; ++rank) {
    ranks[world->members[rank].id] = rank;
    if (world->members[rank].id == id()) mine = rank;
  }
  const wire::RateTable& table = world->rates;
  const bool known = table.hosts.size() == n && table.links.size() == n * n;
  const wire::Measurements news =
      live_rates_.news({known ? table.hosts[mine] : wire::HostRate{},
                        [&](const PeerId& peer) {
                          const auto rank = ranks.find(peer);
                          return known && rank != ranks.end() ? table.links[mine * n + rank->second]
                                                              : wire::LinkRate{};
                        }},
                       now_);
  if (news != wire::Measurements{}) session_.measured(news);
}

// Counts what has come on a stripe since the last look.
void Engine::count_for_prober(const link::Stripe& from) {
  if (!prober_.active()) return;
  const PeerId* const peer = links_.peer_of(from.id());
  const std::uint64_t bytes = links_.received_since_probe(from.id());
  if (peer != nullptr && bytes > 0) prober_.on_bytes(*peer, bytes, now_);
}

// ---- frames

link::Placement Engine::place(link::Stripe& from, const link::FrameHeader& header) {
  const PeerId* const peer = links_.peer_of(from.id());
  if (peer == nullptr) {
    link::Placement refused;
    refused.kind = link::Placement::Kind::refuse;
    refused.reason = "data before the handshake";
    return refused;
  }
  if (header.type == link::FrameType::state) return transfer_.place(*peer, header);
  if (header.type == link::FrameType::probe) return {};  // drained
  link::Placement placement = executor_.place(*peer, header, was_called(header.key));
  executor_told();
  return placement;
}

Status Engine::arrived(link::Stripe& from, const link::FrameHeader& header, std::uint64_t token,
                       Buffer buffer) {
  const PeerId* const known = links_.peer_of(from.id());
  if (known == nullptr) return {};
  const PeerId peer = *known;
  links_.confirm(from);
  count_for_prober(from);
  if (header.type == link::FrameType::state) {
    const Status status = transfer_.arrived(peer, header, std::move(buffer));
    transfer_told();
    if (sync_) {
      sync_->call->bytes_wanted = transfer_.bytes_wanted();
      sync_->call->bytes_done = transfer_.bytes_done();
    }
    return status;
  }
  const Status status =
      executor_.arrived(peer, header, token, std::move(buffer), was_called(header.key));
  executor_told();
  return status;
}

void Engine::voided(link::Stripe& from, const link::FrameHeader& header, std::uint64_t token) {
  const PeerId* const known = links_.peer_of(from.id());
  if (known == nullptr) return;
  const PeerId peer = *known;
  links_.confirm(from);
  if (header.type == link::FrameType::state) return transfer_.voided(peer, header);
  executor_.voided(peer, header, token);
}

void Engine::drained(link::Stripe& from, const link::FrameHeader& header) {
  const PeerId* const known = links_.peer_of(from.id());
  if (known == nullptr) return;
  const PeerId peer = *known;
  count_for_prober(from);
  if (header.type == link::FrameType::data) executor_.drained(peer, header);
  links_.confirm(from);
}

void Engine::interrupted(link::Stripe& from, const link::FrameHeader& header, std::uint64_t token) {
  const PeerId* const known = links_.peer_of(from.id());
  if (known == nullptr) return;
  const PeerId peer = *known;
  if (header.type == link::FrameType::state) return transfer_.interrupted(header);
  executor_.interrupted(peer, header, token);
}

Status Engine::control(link::Stripe& from, const link::FrameHeader& header,
                       std::span<const std::uint8_t> payload) {
  const auto done = links_.on_control(from, header, payload, link_context());
  links_told();
  if (done) return *done;
  const PeerId* const known = links_.peer_of(from.id());
  if (known == nullptr) return {};
  const PeerId peer = *known;
  switch (header.type) {
    case link::FrameType::pong:
      prober_.on_pong(peer, header, now_);
      on_pong(peer, header);
      return {};
    case link::FrameType::probed:
      prober_.on_probed(peer, header);
      return {};
    case link::FrameType::fetch: {
      const Status status = transfer_.control(peer, header, payload);
      transfer_told();
      return status;
    }
    default: {
      const Status status = executor_.control(peer, header, was_called(header.key));
      executor_told();
      return status;
    }
  }
}

bool Engine::next(link::Stripe& to, link::OutgoingFrame& frame) {
  bool traffic_may = false;
  if (links_.next(to, frame, traffic_may, now_)) return true;
  if (!traffic_may) return false;
  const PeerId peer = *links_.peer_of(to.id());
  if (prober_.next_word(peer, now_, frame) || executor_.next(peer, frame) ||
      transfer_.next(peer, frame))
    return true;
  // A few stripes are enough to fill the way, and one stays free for what is said then.
  return links_.is_among_first(to.id(), prober_.fillers(), 1) &&
         prober_.next_filler(peer, now_, frame);
}

}  // namespace pccl::peer
