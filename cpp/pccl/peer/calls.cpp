#include "pccl/peer/calls.h"

#include <algorithm>
#include <cassert>
#include <string>
#include <string_view>
#include <tuple>

namespace pccl::peer {
namespace {

constexpr std::array<CallTransition, 22> kTransitions = {{
    {CallPhase::unknown, CallPhase::heard, "the master ended it before it was called here"},
    {CallPhase::heard, CallPhase::unknown, "it is called, and ends at once"},
    {CallPhase::unknown, CallPhase::meeting, "a round is entered"},
    {CallPhase::meeting, CallPhase::unknown, "the outcome of a round"},
    {CallPhase::unknown, CallPhase::called, "an operation is called"},
    {CallPhase::called, CallPhase::in_memory, "an attempt begins among members of this host"},
    {CallPhase::called, CallPhase::on_network, "an attempt begins over links"},
    {CallPhase::called, CallPhase::failed, "the members cannot do it"},
    {CallPhase::called, CallPhase::unknown, "this peer is alone"},
    {CallPhase::called, CallPhase::over, "this peer is alone, and the master knows the call"},
    {CallPhase::in_memory, CallPhase::on_network, "memory cannot do it"},
    {CallPhase::in_memory, CallPhase::called, "a new epoch ends the attempt"},
    {CallPhase::in_memory, CallPhase::unknown, "it is decided in memory, or by a verdict"},
    {CallPhase::in_memory, CallPhase::over, "it is decided in memory, and the master knows it"},
    {CallPhase::on_network, CallPhase::called, "a new epoch ends the attempt"},
    {CallPhase::on_network, CallPhase::finished, "every result is here"},
    {CallPhase::on_network, CallPhase::failed, "there is no memory for it"},
    {CallPhase::on_network, CallPhase::unknown, "a verdict"},
    {CallPhase::finished, CallPhase::called, "a new epoch ends the attempt"},
    {CallPhase::finished, CallPhase::unknown, "a verdict"},
    {CallPhase::failed, CallPhase::unknown, "a verdict"},
    {CallPhase::over, CallPhase::unknown, "a verdict"},
}};

constexpr std::string_view kAllReduce = "allreduce";

// For errors: "allreduce of float32[3], sum", "all_gather of float32[3]".
std::string described(const OperationRequest& request) {
  std::string text;
  text.reserve(request.description.size() + 32);
  if (request.kind != collective::Kind::all_reduce) {
    text.append(collective::name(request.kind)).append(" of ");
  } else if (!request.description.starts_with(kAllReduce)) {  // as a compiled program's text does
    text.append(kAllReduce).append(" of ");
  }
  text.append(request.description);
  if (request.kind == collective::Kind::broadcast)
    text.append(", from rank ").append(std::to_string(request.root));
  if (collective::reduces(request.kind)) text.append(", ").append(name(request.op));
  return text;
}

// Whether this is a phase of an operation that has not ended here.
bool is_unfinished(CallPhase phase) {
  switch (phase) {
    case CallPhase::called:
    case CallPhase::in_memory:
    case CallPhase::on_network:
    case CallPhase::finished:
    case CallPhase::failed:
      return true;
    default:
      return false;
  }
}

}  // namespace

const char* name(CallPhase phase) {
  constexpr std::array<const char*, kCallPhases> kNames = {"unknown",  "heard",     "meeting",
                                                           "called",   "in_memory", "on_network",
                                                           "finished", "failed",    "over"};
  return kNames[static_cast<std::size_t>(phase)];
}

std::span<const CallTransition> call_transitions() { return kTransitions; }

// -- numbers

wire::OpKey CallTable::next_operation(std::optional<std::uint64_t> tag) const {
  wire::OpKey key{admission_, tag.has_value(), tag.value_or(0), untagged_};
  if (!tag) return key;
  const auto it = tagged_.find(*tag);
  key.sequence = it == tagged_.end() ? 0 : it->second;
  return key;
}

void CallTable::take_number(const wire::OpKey& key) {
  ++(key.tagged ? tagged_[key.tag] : untagged_);
}

wire::RoundKey CallTable::next_round(wire::RoundKind kind) {
  return {kind, admission_, rounds_[kind]++};
}

bool CallTable::was_called(const wire::CallKey& key) const {
  if (const auto* round = std::get_if<wire::RoundKey>(&key)) {
    const auto it = rounds_.find(round->kind);
    return round->admission != admission_ || (it != rounds_.end() && round->sequence < it->second);
  }
  const auto& operation = std::get<wire::OpKey>(key);
  if (operation.admission != admission_) return true;
  if (!operation.tagged) return operation.sequence < untagged_;
  const auto it = tagged_.find(operation.tag);
  return it != tagged_.end() && operation.sequence < it->second;
}

// -- entries

CallEntry* CallTable::find(const wire::CallKey& key) {
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

const CallEntry* CallTable::find(const wire::CallKey& key) const {
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

CallEntry& CallTable::open(const wire::CallKey& key, const CallPtr& call) {
  CallEntry& entry = entries_[key];
  entry.call = call;
  const bool round = std::holds_alternative<wire::RoundKey>(key);
  move(entry, round ? CallPhase::meeting : CallPhase::called);
  return entry;
}

void CallTable::move(CallEntry& entry, CallPhase to) {
  static_assert(kTransitions.size() == std::tuple_size_v<decltype(taken_)>);
  const auto it = std::find_if(kTransitions.begin(), kTransitions.end(), [&](const auto& row) {
    return row.from == entry.phase && row.to == to;
  });
  assert(it != kTransitions.end() && "an illegal change of a call's phase");
  if (it != kTransitions.end()) ++taken_[static_cast<std::size_t>(it - kTransitions.begin())];
  unfinished_ += is_unfinished(to) ? 1 : 0;
  unfinished_ -= is_unfinished(entry.phase) ? 1 : 0;
  entry.phase = to;
}

void CallTable::forget_due(CallEntry& entry, const wire::CallKey& key) {
  if (!entry.due) return;
  due_.erase({*entry.due, std::get<wire::OpKey>(key)});
  entry.due.reset();
}

void CallTable::drop(Entries::iterator it) {
  forget_due(it->second, it->first);
  move(it->second, CallPhase::unknown);
  entries_.erase(it);
}

void CallTable::end(const wire::CallKey& key) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return;
  CallEntry& entry = it->second;
  if (!entry.told) return drop(it);
  forget_due(entry, key);
  entry.call.reset();
  entry.request = {};
  move(entry, CallPhase::over);
}

void CallTable::clear() {
  entries_.clear();
  due_.clear();
  done_.clear();
  gave_up_.clear();
  unfinished_ = 0;
}

std::vector<wire::OpKey> CallTable::operations() const {
  std::vector<wire::OpKey> keys;
  for (const auto& [key, entry] : entries_)
    if (is_unfinished(entry.phase)) keys.push_back(std::get<wire::OpKey>(key));
  return keys;
}

std::vector<CallPtr> CallTable::operation_calls() const {
  std::vector<CallPtr> calls;
  for (const auto& [key, entry] : entries_)
    if (is_unfinished(entry.phase)) calls.push_back(entry.call);
  return calls;
}

std::vector<CallPtr> CallTable::calls() const {
  std::vector<CallPtr> calls;
  for (const auto& [key, entry] : entries_)
    if (entry.call != nullptr) calls.push_back(entry.call);
  return calls;
}

bool CallTable::awaits(const wire::CallKey& key) const {
  const CallEntry* const entry = find(key);
  if (entry == nullptr) return false;
  if (entry->phase == CallPhase::over) return entry->told->phase == wire::OpPhase::done;
  return entry->phase != CallPhase::heard;
}

void CallTable::begin_admission(std::uint64_t admission) {
  clear();
  admission_ = admission;
  untagged_ = 0;
  tagged_.clear();
  rounds_.clear();
}

// -- verdicts of the master

void CallTable::close_at_master(const wire::CallKey& key) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return;
  it->second.told.reset();
  it->second.entered.reset();
  it->second.abort.reset();
  if (it->second.phase == CallPhase::over) drop(it);
}

void CallTable::hear(const wire::CallKey& key, Decision decision) {
  if (was_called(key)) return;
  CallEntry& entry = entries_[key];
  entry.early = std::move(decision);
  if (entry.phase == CallPhase::unknown) move(entry, CallPhase::heard);
}

std::optional<Decision> CallTable::take_early(const wire::CallKey& key) {
  const auto it = entries_.find(key);
  if (it == entries_.end() || it->second.phase != CallPhase::heard) return std::nullopt;
  std::optional<Decision> early = std::move(it->second.early);
  drop(it);
  return early;
}

// -- reports to the master

const wire::OpState& CallTable::tell(const wire::OpKey& key, CallEntry& entry,
                                     wire::OpPhase phase) {
  entry.told_attempt = true;
  entry.told = {
      key, entry.attempt, phase, entry.request.rerun, {entry.signature, described(entry.request)}};
  return *entry.told;
}

void CallTable::tell_later(const wire::OpKey& key, CallEntry& entry, Instant when) {
  if (entry.due && *entry.due <= when) return;
  forget_due(entry, key);
  entry.due = when;
  due_.insert({when, key});
}

void CallTable::finish(const wire::OpKey& key, CallEntry& entry) {
  move(entry, CallPhase::finished);
  entry.told_attempt = true;  // `done` implies entered
  forget_due(entry, key);
  tell_done(key);
}

std::vector<wire::OpKey> CallTable::take_due(Instant now, bool all) {
  std::vector<wire::OpKey> keys;
  while (!due_.empty() && (all || due_.begin()->first <= now)) {
    const wire::OpKey key = due_.begin()->second;
    due_.erase(due_.begin());
    entries_.at(key).due.reset();
    keys.push_back(key);
  }
  return keys;
}

Instant CallTable::next_due() const { return due_.empty() ? Instant::max() : due_.begin()->first; }

std::vector<wire::OpState> CallTable::take_reports() {
  std::vector<wire::OpState> states;
  for (const wire::OpKey& key : std::exchange(done_, {})) {
    CallEntry* const entry = find(key);
    if (entry == nullptr) continue;
    if (entry->phase == CallPhase::finished)
      states.push_back(tell(key, *entry, wire::OpPhase::done));
    if (entry->phase == CallPhase::over) states.push_back(*entry->told);
  }
  return states;
}

void CallTable::renew_reports(std::uint64_t epoch) {
  for (auto& [key, entry] : entries_) {
    if (entry.phase != CallPhase::over || entry.told->phase != wire::OpPhase::done) continue;
    entry.told->attempt = epoch;
    tell_done(std::get<wire::OpKey>(key));
  }
}

std::vector<wire::Message> CallTable::open_messages() const {
  std::vector<wire::OpState> states;
  for (const auto& [key, entry] : entries_)
    if (entry.told) states.push_back(*entry.told);
  std::vector<wire::Message> messages;
  for (auto& part : wire::in_parts(std::move(states)))
    messages.emplace_back(wire::OpReport{std::move(part)});
  for (const auto& [key, entry] : entries_)
    if (entry.entered)
      messages.emplace_back(wire::EnterRound{{std::get<wire::RoundKey>(key), *entry.entered}});
  for (const auto& [key, entry] : entries_)
    if (entry.abort) messages.emplace_back(*entry.abort);
  return messages;
}

// -- callers that gave up

void CallTable::give_up(const CallPtr& call, Instant until, Code code) {
  call->gave_up = {until, code};
  gave_up_.push_back(call);
}

std::vector<CallPtr> CallTable::gave_up() {
  std::erase_if(gave_up_, [](const CallPtr& call) { return call->done.load(); });
  return gave_up_;
}

Instant CallTable::next_give_up() const {
  Instant next = Instant::max();
  for (const CallPtr& call : gave_up_)
    if (!call->done) next = std::min(next, call->gave_up->first);
  return next;
}

}  // namespace pccl::peer
