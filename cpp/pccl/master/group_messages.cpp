// The messages of members and newcomers to their group.
#include <algorithm>
#include <utility>

#include "pccl/base/overloaded.h"
#include "pccl/master/group.h"

namespace pccl::master {
namespace {

// The length of the list in messages that are charged by floods(); empty: charged elsewhere, as
// entering calls is free.
std::optional<std::size_t> talk_in(const wire::Message& message) {
  using Items = std::optional<std::size_t>;
  return std::visit(
      Overloaded{[](const wire::Blocked& blocked) -> Items { return blocked.waits.size(); },
                 [](const wire::Neighbourhood& near) -> Items { return near.peers.size(); },
                 [](const wire::Measured& measured) -> Items { return measured.row.links.size(); },
                 [](const wire::Prepared& prepared) -> Items { return prepared.without.size(); },
                 [](const wire::OpReport& report) -> Items {
                   return report.states.empty() ? Items(0) : std::nullopt;
                 },
                 [](const wire::EnterRound&) -> Items { return std::nullopt; },
                 [](const auto&) -> Items { return 0; }},
      message);
}

}  // namespace

void Group::on_message(ConnectionId from, const wire::Frame& frame, Instant now) {
  Peer* peer = peers_.on(from);
  if (peer == nullptr) return;
  peer->heard = now;
  const bool is_member = peers_.is_member(*peer);
  const std::uint64_t applied = frame.envelope.ordinal;
  if (is_member && applied > log_.last()) {
    return evict(from, Code::evicted, "it claims to have seen decisions that were never made", now);
  }
  if (is_member && applied > peer->applied) {
    peer->applied = applied;
    decisions_.collect_log();
  }
  if (const auto items = talk_in(frame.message); items && floods(*peer, *items, now)) return;
  if (is_member) {
    hear_member(*peer, frame.message, applied, now);
  } else {
    hear_newcomer(*peer, frame.message, now);
  }
}

void Group::hear_newcomer(Peer& from, const wire::Message& message, Instant now) {
  std::visit(
      Overloaded{
          [&](const wire::Heartbeat& heartbeat) { from.on_heartbeat(heartbeat, now); },
          [](const wire::Tried&) {},  // for the master, not the group
          // From a member that does not know yet that it was removed.
          [](const wire::LogPart&) {}, [](const wire::AbortRequest&) {},
          [](const wire::Blocked&) {},
          [&](const wire::Measured& measured) {
            if (measured.row.links.size() > options_.limits.max_peers)
              return (void)misuse(from, "more links than peers", now);
            from.row = measured.row;
          },
          [&](const wire::RequestAdmission&) {
            if (from.waiting) return;
            if (!from.budget.turns.take(options_.limits.turns, now))
              return (void)misuse(from, "it asks for admission too often", now);
            from.waiting = true;
            from.start_only = false;
            if (peers_.members.empty()) return start_if_ready(now);
            newcomers_.announce();
            newcomers_.tell_paused(from);
            around_.replicas().changed();
          },
          [&](const wire::WithdrawAdmission&) {
            if (!from.waiting) return;
            from.waiting = false;
            from.prepared_epoch = 0;
            const wire::Member away = from.member;
            newcomers_.announce();
            around_.replicas().away(id_, away, "it no longer waits");
          },
          [&](const wire::Prepared& prepared) {
            if (!from.budget.turns.take(options_.limits.turns, now))
              return (void)misuse(from, "it reports being prepared too often", now);
            newcomers_.prepared(from, prepared);
          },
          [&](const wire::Neighbourhood& near) { on_neighbourhood(from, near, now); },
          [&](const wire::LinkReport& report) { on_newcomers_link(from, report, now); },
          [&](const wire::EnterRound&) { misuse(from, "a newcomer entered a round", now); },
          [&](const wire::OpReport&) { misuse(from, "a newcomer entered an operation", now); },
          [&](const wire::WantRelay&) { misuse(from, "a relay that is not due", now); },
          [&](const wire::Leave&) {
            around_.close(from.connection);
            const wire::Member gone = newcomers_.drop(from);
            around_.replicas().departed(id_, gone, "it left", false, false);
          },
          [&](const auto&) { misuse(from, "a message that peers do not send here", now); }},
      message);
}

void Group::hear_member(Peer& from, const wire::Message& message, std::uint64_t applied,
                        Instant now) {
  const PeerId id = from.member.id;
  const Limits& limits = options_.limits;
  std::visit(
      Overloaded{
          [&](const wire::Heartbeat& heartbeat) { on_heartbeat(from, heartbeat, now); },
          [](const wire::Tried&) {},  // for the master, not the group
          // The answer is late: another member with a newer log was asked.
          [](const wire::LogPart&) {},
          // From a newcomer that does not know yet that it was admitted.
          [](const wire::RequestAdmission&) {}, [](const wire::WithdrawAdmission&) {},
          [](const wire::Prepared&) {},
          [&](const wire::Neighbourhood& near) { on_neighbourhood(from, near, now); },
          [&](const wire::Measured& measured) {
            if (measured.row.links.size() > limits.max_peers)
              return (void)misuse(from, "more links than peers", now);
            planning_.measured(peers_.rank_of(id), measured.row, record_.rates);
            if (planning_.early(now)) decisions_.reconsider_plan(now);
          },
          [&](const wire::EnterRound& enter) {
            if (!payload_fits(enter.entry))
              return (void)misuse(from, "a round entered with the wrong payload", now);
            if (enter.entry.key.admission != record_.admission &&
                stray(from, "rounds of other admissions", now))
              return;
            on_round(from, enter.entry, applied, now);
          },
          [&](const wire::OpReport& report) {
            for (const wire::OpState& state : report.states) {
              Peer* const sender = peers_.member(id);
              if (sender == nullptr) return;
              on_operation(*sender, state, applied, now);
            }
            decisions_.reconsider_plan(now);  // a busy program may be between operations only here
          },
          [&](const wire::AbortRequest& request) { on_abort(from, request, applied, now); },
          [&](const wire::LinkReport& report) { on_link(from, report, now); },
          [&](const wire::Blocked& blocked) {
            if (blocked.waits.size() > limits.max_waits)
              return (void)misuse(from, "it waits in too many calls", now);
            from.on_blocked(blocked, applied, now);
            call_rules_.check_stuck(now);
          },
          [&](const wire::WantRelay& want) { on_want_relay(from, want, now); },
          [&](const wire::Leave& leave) {
            const bool finished = leave.reason.empty();
            remove({{id, Code::evicted, finished ? "it left" : leave.reason, finished}}, now);
          },
          [&](const auto&) { misuse(from, "a message that peers do not send here", now); }},
      message);
}

void Group::on_heartbeat(Peer& from, const wire::Heartbeat& heartbeat, Instant now) {
  const std::uint64_t before = from.totals.operations;
  from.on_heartbeat(heartbeat, now);
  // All members commit the same operations, also those that this master does not hear of.
  if (&from == peers_.members.data() && from.totals.operations > before)
    operations_ += from.totals.operations - before;
}

void Group::on_neighbourhood(Peer& from, const wire::Neighbourhood& neighbourhood, Instant now) {
  if (neighbourhood.peers.size() > options_.limits.max_peers)
    return (void)misuse(from, "more neighbours than peers", now);
  const std::set<PeerId> before =
      std::exchange(from.shares_with, {neighbourhood.peers.begin(), neighbourhood.peers.end()});
  const bool fewer = std::ranges::any_of(before, [&](const PeerId& other) {
    return !from.shares_with.contains(other) && peers_.member(other) != nullptr;
  });
  if (fewer && !from.budget.restarts.take(options_.limits.restarts, now))
    return (void)misuse(from, "it stops sharing memory too often", now);
  from.sharing_pending = neighbourhood.pending;
  if (!peers_.is_member(from)) return;
  planning_.forget_hosts();
  // If other members still detect shared memory, wait for the next tick.
  if (peers_.sharing_settled()) decisions_.check_plan(now);
}

void Group::on_abort(Peer& from, const wire::AbortRequest& request, std::uint64_t applied,
                     Instant now) {
  if (log_.decided_after(request.key, applied)) return;
  const std::uint64_t admission =
      std::visit([](const auto& key) { return key.admission; }, request.key);
  if (admission != record_.admission) {
    (void)stray(from, "calls of other admissions given up", now);
    return;
  }
  if (!from.budget.aborts.take(options_.limits.aborts, now))
    return (void)misuse(from, "it gives up too many calls", now);
  call_rules_.abort(from.member.id, request);
}

void Group::on_newcomers_link(Peer& from, const wire::LinkReport& report, Instant now) {
  const Peer* about = peers_.member(report.peer);
  if (about == nullptr || report.state != wire::LinkState::unreachable) return;
  // The only member has lost its control connection too: no other member can report its loss.
  if (about->connection == 0 && peers_.members.size() == 1) {
    return remove({{report.peer, Code::evicted, "connection lost (" + report.reason + ")"}}, now);
  }
  // A member that the master does not hear from either may be gone. The newcomer continues to
  // connect and reports again.
  if (!from.waiting || peers_.silent(report.peer, options_, now)) return;
  // Admit the newcomer only if a plan avoids that link: otherwise all members would lose the
  // newcomer at once.
  from.unreachable.insert(report.peer);
  if (planning_.fits(from)) return;
  evict(from.connection, Code::unreachable,
        "it cannot reach peer " + peers_.shown(report.peer) + " (" + report.reason +
            "), nor can that peer reach it, and no plan avoids that link: " +
            link_advice(options_.relays),
        now);
}

void Group::on_link(Peer& from, const wire::LinkReport& report, Instant now) {
  const PeerId id = from.member.id;
  if (peers_.member(report.peer) == nullptr || report.peer == id) {
    const bool newcomer = std::ranges::any_of(peers_.candidates, [&](const Peer& candidate) {
      return candidate.member.id == report.peer;
    });
    if (!newcomer) (void)stray(from, "reports about links to nobody", now);
    return;
  }
  if (link_rules_.report(id, report, now)) check_links(now);
}

// Sends each end the token that identifies its connection to the relay.
void Group::on_want_relay(Peer& from, const wire::WantRelay& want, Instant now) {
  const PeerId id = from.member.id;
  const Peer* other = peers_.member(want.peer);
  // Only the newer of two members asks.
  const bool older = other != nullptr && from.member.joined <= other->member.joined;
  if (older || want.stripes == 0 || want.stripes > kMaxRelayStripes)
    return (void)misuse(from, "a relay that is not due", now);
  const Pair pair = pair_of(id, want.peer);
  if (other == nullptr || !relayed_pairs(record_).contains(pair)) {
    (void)stray(from, "relays that no epoch speaks of", now);
    return;
  }
  // The peer repeats its request until the other member is connected. The record may be from
  // another master that relayed while this one does not.
  if (other->connection == 0 || !options_.relays ||
      !from.budget.wants.take(options_.limits.wants, now))
    return;
  links_.want_relay(pair);
  for (std::uint32_t i = 0; i < want.stripes; ++i) {
    const auto tokens =
        around_.expect_relay(id, want.peer, peers_.shown(id) + " and " + peers_.shown(want.peer));
    if (!tokens) return;
    around_.send(from.connection, log_.collected(), wire::Relay{want.peer, tokens->first});
    around_.send(other->connection, log_.collected(), wire::Relay{id, tokens->second});
  }
}

void Group::on_operation(Peer& from, const wire::OpState& state, std::uint64_t applied,
                         Instant now) {
  if (state.key.admission != record_.admission) {
    (void)stray(from, "operations of other admissions", now);
    return;
  }
  if (log_.decided_after(state.key, applied)) {
    (void)floods(from, 0, now);
    return;
  }
  const PeerId id = from.member.id;
  if (!calls_.room_for(state.key)) {
    evict_busiest(now);
    Peer* const still = peers_.member(id);
    if (still == nullptr || !calls_.room_for(state.key)) return;
    return on_operation(*still, state, applied, now);
  }
  // A report about a void attempt shows only that the peer has entered.
  const bool current = state.attempt >= record_.abort_floor;
  const bool done = current && state.phase == wire::OpPhase::done;
  // Reports of progress are free.
  if (calls_.repeats(id, state, done, record_.epoch) && floods(from, 0, now)) return;
  calls_.enter(id, state, current, peers_.members.size(), now);
  check_call(state.key, now);
}

void Group::on_round(Peer& from, const wire::RoundEntry& entry, std::uint64_t applied,
                     Instant now) {
  const bool decided =
      entry.key.admission != record_.admission || log_.decided_after(entry.key, applied);
  const PeerId id = from.member.id;
  if ((decided || calls_.entered(id, entry.key)) &&
      floods(from, bytes_of(entry.payload) / Budget::kBytesOfItem, now))
    return;
  if (decided) return;
  if (calls_.too_much(id, entry)) return (void)misuse(from, "it holds too many syncs open", now);
  if (!calls_.room_for(entry.key)) {
    evict_busiest(now);
    Peer* const still = peers_.member(id);
    if (still == nullptr || !calls_.room_for(entry.key)) return;
    return on_round(*still, entry, applied, now);
  }
  calls_.enter(id, entry, now);
  check_call(entry.key, now);
}

}  // namespace pccl::master
