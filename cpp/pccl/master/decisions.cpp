#include "pccl/master/decisions.h"

#include <algorithm>
#include <utility>

#include "pccl/base/overloaded.h"
#include "pccl/base/text.h"

namespace pccl::master {

// -- the log

void Decisions::append(DecisionLog::Decision what) {
  const wire::Log message{{log_.append(std::move(what))}};
  context_.around.appended(context_.id, message.entries.front());
  for (const Peer& peer : peers_.members) {
    if (peer.connection != 0) context_.around.send(peer.connection, log_.collected(), message);
  }
}

void Decisions::collect_log() {
  std::uint64_t least = log_.last();
  for (const Peer& peer : peers_.members) least = std::min(least, peer.applied);
  log_.collect(least);
}

void Decisions::send_log(const Peer& to, std::uint64_t after) {
  for (auto& part : wire::in_parts(log_.after(after)))
    context_.around.send(to.connection, log_.collected(), wire::Log{std::move(part)});
}

bool Decisions::adopt(const std::vector<wire::LogEntry>& log, std::uint64_t applied) {
  const std::vector<wire::LogEntry> fresh = log_.adoptable(log, applied);
  if (fresh.empty()) return false;
  for (const wire::LogEntry& entry : fresh) {
    append(entry.what);
    std::visit(Overloaded{[](const wire::EpochRecord&) {},
                          [&](const wire::Verdict& verdict) { calls_.erase(verdict.key); },
                          [&](const wire::Outcome& outcome) {
                            wire::apply(outcome, record_);
                            calls_.erase(outcome.key);
                          }},
               entry.what);
  }
  log_.adopted();
  return true;
}

// -- calls

void Decisions::decide(const wire::CallKey& key, Code code, const PeerId& culprit,
                       const std::string& reason, const std::string& waiting,
                       const wire::SyncDecision& sync) {
  if (const auto* op = std::get_if<wire::OpKey>(&key)) {
    const bool admission_due = code == Code::ok && (newcomers_.any_ready() ||
                                                    planning_.measuring_helps(record_.admission));
    append(wire::Verdict{*op, record_.epoch, code, admission_due, culprit, reason, waiting});
  } else {
    const auto& round = std::get<wire::RoundKey>(key);
    const bool yes = round.kind == wire::RoundKind::peers_pending
                         ? newcomers_.any_ready()
                         : code == Code::ok && measure_at(round);
    const wire::Outcome outcome{round,   code,   yes ? 1U : 0U, context_.around.census(),
                                culprit, reason, waiting,       sync};
    append(outcome);
    wire::apply(outcome, record_);
  }
  calls_.erase(key);
}

// Whether members should measure at this admission point: not if a member's program decides itself
// when to measure (explicit API).
bool Decisions::measure_at(const wire::RoundKey& key) {
  const auto round = calls_.rounds().find(key);
  if (round == calls_.rounds().end() || !planning_.measuring_helps(record_.admission)) return false;
  const bool all = std::ranges::all_of(round->second.entered, [](const auto& item) {
    const auto* point = std::get_if<wire::AdmissionPoint>(&item.second);
    return point != nullptr && point->measures;
  });
  // Once per admission, even if a member declines.
  planning_.asked_to_measure(record_.admission);
  if (!all) return false;
  context_.note("operations are slow, so the links are measured");
  return true;
}

// -- epochs

void Decisions::start(std::vector<Peer> founders) {
  calls_.clear();
  log_.clear();
  links_.clear();
  planning_.begin_group();
  record_.state = {};
  record_.syncing = false;
  record_.rates = {};
  record_.point_open = false;
  peers_.members = std::move(founders);
  for (Peer& peer : peers_.members) peer.since = context_.around.now();
  plan_epoch();
  begin_epoch(wire::Cause::admission);
  context_.note("started with " + plural(peers_.members.size(), "peer"));
}

void Decisions::admit(wire::RoundKind kind, const std::vector<std::string>& replicas) {
  // All members are in the same call, so all call numbers can restart.
  const std::size_t before = peers_.members.size();
  calls_.clear();
  newcomers_.enter(replicas);
  for (std::size_t rank = before; rank < peers_.members.size(); ++rank)
    peers_.members[rank].since = context_.around.now();
  plan_or_use_all();
  const bool syncing = kind == wire::RoundKind::sync_admit;
  record_.syncing = syncing;
  if (peers_.ranks_per_replica > 0) {
    record_.points = wire::next_point(record_, kind);
    record_.point_open = syncing;
    context_.around.replicas().changed();
  }
  begin_epoch(wire::Cause::admission);
  context_.note(plural(peers_.members.size() - before, "newcomer") + " admitted, " +
                plural(peers_.members.size(), "member"));
}

void Decisions::lose(std::vector<wire::Departure> departures) {
  if (!peers_.members.empty()) plan_or_use_all();
  begin_loss(std::move(departures));
  collect_log();
}

void Decisions::reset_links() {
  const std::string reason = "a connection between two members broke" + links_.example(peers_);
  context_.note(reason, true);
  links_.clear_troubles();
  begin_loss({{PeerId{}, reason}});
}

void Decisions::start_over() {
  calls_.restart();
  begin_epoch(wire::Cause::plan);
}

void Decisions::begin_term() {
  plan_or_use_all();
  start_over();
}

void Decisions::begin_loss(std::vector<wire::Departure> departures) {
  std::vector<wire::OpKey> aborted = calls_.abort_and_restart();
  if (peers_.members.empty()) aborted.clear();
  begin_epoch(wire::Cause::loss, std::move(departures), std::move(aborted));
}

// Begins an epoch of the present members. REQUIRES: plan_epoch() succeeded, or there are no
// members; calls_ was cleared or restarted. `aborted`: operations that have ended.
void Decisions::begin_epoch(wire::Cause cause, std::vector<wire::Departure> departures,
                            std::vector<wire::OpKey> aborted) {
  epoch_began_ = context_.around.now();
  ++record_.epoch;
  record_.cause = cause;
  if (cause == wire::Cause::admission) {
    record_.admission = record_.epoch;
    planning_.admitted(context_.around.now());
  } else {
    record_.syncing = false;
  }
  record_.abort_floor = record_.epoch;
  record_.members.clear();
  for (Peer& peer : peers_.members) {
    record_.members.push_back(peer.member);
    peer.row = {};  // the plan has it
  }
  record_.ranks_per_replica = peers_.ranks_per_replica;
  std::erase_if(record_.state.holders,
                [&](const PeerId& id) { return peers_.member(id) == nullptr; });
  record_.census = context_.around.census();
  record_.departures = std::move(departures);
  record_.aborted = std::move(aborted);
  if (peers_.members.empty()) record_.relayed.clear();
  append(record_);
  for (const Pair& pair : links_.end_relays(relayed_pairs(record_)))
    context_.around.end_relay(pair.first, pair.second);
  links_.begin_epoch();
  newcomers_.announce();
}

// -- plans

bool Decisions::plan_epoch() {
  planning_.forget_hosts();
  auto draft = planning_.draft(record_);
  if (!draft) return false;
  take_plan(std::move(*draft));
  return true;
}

// If no plan avoids the unusable links, try these links again instead of evicting members.
void Decisions::plan_or_use_all() {
  if (plan_epoch()) return;
  links_.use_all();
  plan_epoch();
}

void Decisions::take_plan(Draft draft) {
  const std::string why = planning_.take(std::move(draft), record_);
  if (!why.empty()) context_.note("plan: " + why);
}

void Decisions::check_plan(Instant now) {
  if (!planning_.hosts_due(record_, now) || !plan_epoch()) return;
  context_.note("planned for changed memory sharing");
  start_over();
}

void Decisions::reconsider_plan(Instant now) {
  if (!planning_.look_due(now) || peers_.members.empty() || links_.troubled()) return;
  if (!calls_.operations().empty() && !planning_.early(now)) return;
  auto better = planning_.better(record_, now);
  if (!better) return;
  take_plan(std::move(*better));
  start_over();
}

}  // namespace pccl::master
