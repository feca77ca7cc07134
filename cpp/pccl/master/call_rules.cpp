#include "pccl/master/call_rules.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "pccl/base/text.h"
#include "pccl/master/judgements.h"
#include "pccl/state/election.h"

namespace pccl::master {
namespace {

// Members that have not entered the other rounds are receiving state or measuring; a failure shows
// on their links.
bool may_be_overdue(const wire::RoundKey& key) {
  return key.kind != wire::RoundKind::sync_end && key.kind != wire::RoundKind::optimize;
}

}  // namespace

std::vector<Departed> CallRules::check(const wire::CallKey& key, Instant now) {
  if (const auto* round = std::get_if<wire::RoundKey>(&key)) return check_round(*round);
  check_operation(std::get<wire::OpKey>(key), now);
  return {};
}

void CallRules::check_operation(const wire::OpKey& key, Instant now) {
  const auto it = calls_.operations().find(key);
  if (it == calls_.operations().end()) return;
  OpenOperation& operation = it->second;
  if (!operation.agree()) {
    std::vector<Claim> claims;
    for (const Peer& peer : peers_.members) {
      const auto entry = operation.entries().find(peer.member.id);
      if (entry != operation.entries().end() && entry->second.current)
        claims.push_back({peer.member.id, entry->second.signature});
    }
    const bool waited =
        operation.mismatch_since && now - *operation.mismatch_since >= kMismatchGrace;
    if (const auto mismatch =
            judge_mismatch(wire::describe(key), claims, peers_.members.size(), waited,
                           [this](const PeerId& id) { return named(id); })) {
      decisions_.decide(key, Code::mismatched_call, mismatch->culprit, mismatch->reason, {});
    } else if (!operation.mismatch_since) {
      operation.mismatch_since = now;
    }
    return;
  }
  if (operation.done() < peers_.members.size()) return;
  planning_.operation_took(now - operation.met.value_or(now));
  decisions_.decide(key, Code::ok, {}, {}, {});
}

std::vector<Departed> CallRules::check_round(const wire::RoundKey& key) {
  if (!calls_.entered_by_all(key, peers_.members.size())) return {};
  switch (key.kind) {
    case wire::RoundKind::admit:
    case wire::RoundKind::sync_admit:
      if (peers_.ranks_per_replica > 0) {
        const auto replicas =
            context_.around.replicas().to_admit(context_.id, wire::next_point(record_, key.kind));
        if (!replicas) return {};
        if (!replicas->empty()) {
          decisions_.admit(key.kind, *replicas);
          return {};
        }
        context_.around.replicas().changed();
      } else if (newcomers_.any_ready()) {
        decisions_.admit(key.kind, {});
        return {};
      }
      break;
    case wire::RoundKind::sync:
    case wire::RoundKind::sync_detail:
    case wire::RoundKind::sync_end:
      return check_sync(key);
    case wire::RoundKind::optimize:
      optimize(key);
      break;
    case wire::RoundKind::peers_pending:
    case wire::RoundKind::barrier:
      break;
  }
  decisions_.decide(key, Code::ok, {}, {}, {});
  return {};
}

// All members have reported their measurements. Begins an epoch even if the plan does not change,
// so that all members, and a later master, know the rates.
void CallRules::optimize(const wire::RoundKey& key) {
  const OpenRound& round = calls_.rounds().at(key);
  const std::vector<PeerId> ids = peers_.ids();
  for (std::size_t rank = 0; rank < ids.size(); ++rank) {
    if (const auto* row = std::get_if<wire::Measurements>(&round.entered.at(ids[rank])))
      planning_.measured(rank, *row, record_.rates);
  }
  if (planning_.rates_differ(record_.rates) && decisions_.plan_epoch()) decisions_.start_over();
}

// All members have reported their states: see state/election.h.
std::vector<Departed> CallRules::check_sync(const wire::RoundKey& key) {
  const OpenRound& round = calls_.rounds().at(key);
  state::Judgement judgement;
  if (key.kind == wire::RoundKind::sync_end) {
    std::vector<state::End> ends;
    for (const auto& [id, payload] : round.entered)
      ends.push_back({id, peers_.shown(id), std::get<wire::SyncEnd>(payload)});
    judgement = state::judge_ends(ends);
  } else {
    std::vector<state::Ballot> ballots;
    for (const Peer& peer : peers_.members) {
      const wire::RoundPayload& payload = round.entered.at(peer.member.id);
      const std::string name = peers_.shown(peer.member.id);
      if (const auto* detail = std::get_if<wire::SyncDetail>(&payload)) {
        ballots.push_back({peer.member.id, name, detail->vote, &detail->entries});
      } else {
        ballots.push_back({peer.member.id, name, std::get<wire::SyncVote>(payload), nullptr});
      }
    }
    judgement = key.kind == wire::RoundKind::sync ? state::judge_votes(ballots, record_.state)
                                                  : state::judge_details(ballots, record_.state);
  }
  if (!judgement.removals.empty()) {
    // The round continues without these members.
    std::vector<Departed> gone;
    for (state::Removal& removal : judgement.removals)
      gone.push_back({removal.peer, removal.code, std::move(removal.reason)});
    return gone;
  }
  if (judgement.code != Code::ok) judgement.decision = {};
  decisions_.decide(key, judgement.code, judgement.culprit, judgement.reason, {},
                    judgement.decision);
  return {};
}

std::string CallRules::named(const PeerId& id) const {
  const auto departed = std::ranges::find(record_.departures, id, &wire::Departure::id);
  return departed == record_.departures.end() ? peers_.named(id) : "peer " + departed->name;
}

void CallRules::abort(const PeerId& id, const wire::AbortRequest& request) {
  const std::string who = peers_.named(id);
  const std::string what = wire::describe(request.key);
  if (request.code == Code::peer_lost) {
    const bool gone = !request.lost.empty() && peers_.member(request.lost) == nullptr;
    const PeerId lost = gone ? request.lost : PeerId{};
    const std::string whom = gone ? named(lost) : "a member";
    decisions_.decide(request.key, Code::peer_lost, lost,
                      whom + " was lost before " + what + " was complete", {});
  } else if (request.code == Code::interrupted) {
    decisions_.decide(request.key, Code::peer_lost, id, who + " was interrupted in " + what, {});
  } else {
    decisions_.decide(request.key, Code::timeout, id,
                      "the deadline of " + who + " passed in " + what, {});
  }
}

void CallRules::check_stuck(Instant now) {
  std::vector<Waiting> waiting;
  for (const Peer& peer : peers_.members) {
    waiting.push_back({peer.member.id,
                       peer.connection != 0 && peer.blocked_at_ordinal == log_.last(),
                       peer.blocked});
  }
  const Stuckness verdict = judge_stuck(waiting, [&](const wire::CallKey& call) {
    return calls_.entered_by_all(call, peers_.members.size());
  });
  if (verdict == Stuckness::moving) {
    calls_.unstick();
    return;
  }
  const Instant since = calls_.stuck(now);
  if (verdict == Stuckness::suspicious && now - since < kSeveralThreadsGrace) return;
  const auto who = [this](const PeerId& id) { return named(id); };
  const auto name = [this](const wire::CallKey& key) { return calls_.described(key); };
  const std::string text = describe_waiting(waiting, "; ", who, name);
  const std::string lines = describe_waiting(waiting, "\n", who, name);
  std::set<wire::CallKey> calls;
  for (const Waiting& member : waiting)
    calls.insert(member.blocked.waits.begin(), member.blocked.waits.end());
  context_.note("stuck: " + text, true);
  calls_.unstick();
  for (const wire::CallKey& call : calls) {
    // A call of another admission, which is over, must not be decided again.
    if (std::visit([](const auto& key) { return key.admission; }, call) != record_.admission)
      continue;
    decisions_.decide(call, Code::deadlock, {},
                      "the members wait in calls that cannot meet: " + text, lines);
  }
}

void CallRules::notice_stragglers(Instant now) {
  struct Wait {
    wire::CallKey oldest;
    Instant opened{};
    bool due = false;
    std::vector<std::optional<Instant>*> noticed;  // of all these calls
  };
  const auto is_due = [&](Instant opened, const std::optional<Instant>& noticed) {
    return noticed ? now - *noticed >= kStragglerRepeat : now - opened >= kStragglerNotice;
  };
  const auto any_due = [&](const auto& calls) {
    return std::ranges::any_of(
        calls, [&](const auto& item) { return is_due(item.second.opened, item.second.noticed); });
  };
  if (!any_due(calls_.operations()) && !any_due(calls_.rounds())) return;
  std::map<std::vector<PeerId>, Wait> waits;  // by the missing peers
  const auto count = [&](const wire::CallKey& key, auto& call, const auto& entered) {
    std::vector<PeerId> missing;
    for (const Peer& peer : peers_.members)
      if (!entered.contains(peer.member.id)) missing.push_back(peer.member.id);
    if (missing.empty()) return;
    Wait& wait = waits[missing];
    if (wait.noticed.empty() || call.opened < wait.opened) {
      wait.oldest = key;
      wait.opened = call.opened;
    }
    wait.due = wait.due || is_due(call.opened, call.noticed);
    wait.noticed.push_back(&call.noticed);
  };
  for (auto& [key, operation] : calls_.operations()) count(key, operation, operation.entries());
  for (auto& [key, round] : calls_.rounds()) count(key, round, round.entered);
  for (const auto& [missing, wait] : waits) {
    if (!wait.due) continue;
    for (std::optional<Instant>* noticed : wait.noticed) *noticed = now;
    std::string names;
    for (std::size_t i = 0; i < std::min<std::size_t>(missing.size(), 4); ++i)
      names += (i > 0 ? ", " : " ") + peers_.named(missing[i]);
    const auto waited = std::chrono::duration_cast<std::chrono::seconds>(now - wait.opened);
    std::string line = "waiting for " + plural(missing.size(), "peer") + " in " +
                       calls_.described(wait.oldest) + " for " + std::to_string(waited.count()) +
                       " s:" + names + (missing.size() > 4 ? " ..." : "");
    if (wait.noticed.size() > 1) line += "; and in " + plural(wait.noticed.size() - 1, "more call");
    for (const Peer& peer : peers_.members) {
      const bool waits_too = std::ranges::find(missing, peer.member.id) == missing.end();
      if (peer.connection != 0 && waits_too)
        context_.around.send(peer.connection, log_.collected(), wire::Notice{line});
    }
  }
}

template <class Entered>
CallRules::Patience CallRules::patience_of(const Entered& entered) const {
  Patience wait;
  for (const Peer& peer : peers_.members) {
    if (!entered.contains(peer.member.id)) continue;
    if (peer.patience.quorum == 0) return {};
    const std::size_t count = peers_.members.size();
    // A minority puts nobody out, whatever it says.
    const std::size_t needed =
        std::max<std::size_t>((count * peer.patience.quorum + 999) / 1000, count / 2 + 1);
    wait.needed = std::max(wait.needed, needed);
    wait.grace = std::max<Duration>(wait.grace, std::chrono::milliseconds(peer.patience.grace_ms));
  }
  return wait;
}

std::vector<Departed> CallRules::find_late(Instant now, bool frozen) {
  std::vector<Departed> late;
  // Calls that cannot meet, or do not match, end for all.
  const bool may_judge = !frozen && !calls_.doubtful();
  const auto judge = [&](const wire::CallKey& key, auto& call, const auto& entered) {
    const Patience wait = patience_of(entered);
    const bool quorum = wait.needed > 0 && entered.size() >= wait.needed;
    // Members return to another master one after the other.
    const auto may_be_late = [&](const Peer& peer) {
      return entered.contains(peer.member.id) || peer.returned;
    };
    if (!quorum || !may_judge || !std::ranges::all_of(peers_.members, may_be_late))
      return call.quorum_since.reset();
    if (!call.quorum_since) {  // the others have one tick at least
      call.quorum_since = now;
      return;
    }
    if (now - *call.quorum_since < wait.grace || !late.empty()) return;
    for (const Peer& peer : peers_.members) {
      if (entered.contains(peer.member.id)) continue;
      late.push_back({peer.member.id, Code::evicted,
                      "it is late: " + std::to_string(entered.size()) + " of " +
                          plural(peers_.members.size(), "member") + " have waited for it in " +
                          calls_.described(key)});
    }
  };
  for (auto& [key, operation] : calls_.operations()) judge(key, operation, operation.entries());
  for (auto& [key, round] : calls_.rounds())
    if (may_be_overdue(key)) judge(key, round, round.entered);
  return late;
}

std::vector<Departed> CallRules::end_overdue(Instant now) {
  if (!context_.options.straggler_timeout) return {};
  std::vector<Departed> gone;
  std::vector<std::pair<wire::CallKey, std::string>> over;
  const auto judge = [&](const wire::CallKey& key, Instant opened, auto has_entered) {
    if (now - opened < *context_.options.straggler_timeout || !gone.empty()) return;
    std::string names;
    for (const Peer& peer : peers_.members) {
      if (has_entered(peer.member.id)) continue;
      names += (names.empty() ? " " : ", ") + peers_.named(peer.member.id);
      gone.push_back({peer.member.id, Code::evicted,
                      "the others have waited too long for it in " + calls_.described(key)});
    }
    if (gone.size() * 2 <= peers_.members.size()) return;
    gone.clear();
    over.emplace_back(key, "more than half of the members have not called " +
                               calls_.described(key) + " within the straggler timeout:" + names);
  };
  for (const auto& [key, operation] : calls_.operations()) {
    judge(key, operation.opened,
          [&](const PeerId& id) { return operation.entries().contains(id); });
  }
  for (const auto& [key, round] : calls_.rounds()) {
    if (!may_be_overdue(key)) continue;
    judge(key, round.opened, [&](const PeerId& id) { return round.entered.contains(id); });
  }
  for (const auto& [key, reason] : over) decisions_.decide(key, Code::timeout, {}, reason, {});
  return gone;
}

}  // namespace pccl::master
