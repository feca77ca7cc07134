#include "pccl/master/open_calls.h"

#include <algorithm>

#include "pccl/base/utf8.h"

namespace pccl::master {
namespace {

constexpr std::size_t kShownOfSignature = 100;

}  // namespace

bool payload_fits(const wire::RoundEntry& entry) {
  const wire::RoundPayload& payload = entry.payload;
  const bool nothing = std::holds_alternative<wire::Nothing>(payload);
  switch (entry.key.kind) {
    case wire::RoundKind::sync:
      return std::holds_alternative<wire::SyncVote>(payload);
    case wire::RoundKind::sync_detail:
      return std::holds_alternative<wire::SyncDetail>(payload);
    case wire::RoundKind::sync_end:
      return std::holds_alternative<wire::SyncEnd>(payload);
    case wire::RoundKind::admit:
    case wire::RoundKind::sync_admit:
      return nothing || std::holds_alternative<wire::AdmissionPoint>(payload);
    case wire::RoundKind::optimize:  // a member that has measured nothing sends nothing
      return nothing || std::holds_alternative<wire::Measurements>(payload);
    default:
      return nothing;
  }
}

std::uint64_t bytes_of(const wire::RoundPayload& payload) {
  if (const auto* row = std::get_if<wire::Measurements>(&payload))
    return row->links.size() * sizeof(wire::MeasuredLink);
  const auto* detail = std::get_if<wire::SyncDetail>(&payload);
  if (detail == nullptr) return 0;
  std::uint64_t bytes = 0;
  for (const wire::StateEntry& entry : detail->entries) {
    bytes += sizeof entry + entry.name.size() + entry.kind.size() + entry.containers.size() +
             entry.tie.size() + 8 * entry.shape.size();
  }
  return bytes;
}

// -- one operation

void OpenOperation::enter(const PeerId& from, Entry entry) {
  const auto [it, fresh] = entries_.try_emplace(from);
  // Memory may run out here, where nothing is counted yet.
  if (entry.current) ++signatures_[entry.signature.hash];
  if (!fresh) forget(it->second);
  if (entry.done) ++done_;
  it->second = std::move(entry);
}

void OpenOperation::drop_member(const PeerId& id) {
  const auto it = entries_.find(id);
  if (it == entries_.end()) return;
  forget(it->second);
  entries_.erase(it);
}

void OpenOperation::forget(const Entry& entry) {
  if (entry.done) --done_;
  if (!entry.current) return;
  const auto count = signatures_.find(entry.signature.hash);
  if (--count->second == 0) signatures_.erase(count);
}

void OpenOperation::restart() {
  for (auto& [id, entry] : entries_) entry.current = entry.done = false;
  done_ = 0;
  signatures_.clear();
  met.reset();
  mismatch_since.reset();
}

// -- entering

bool OpenCalls::too_much(const PeerId& from, const wire::RoundEntry& entry) const {
  if (std::holds_alternative<wire::Nothing>(entry.payload)) return false;
  std::uint64_t bytes = bytes_of(entry.payload);
  for (const auto& [key, round] : rounds_) {
    bytes += round.bytes;
    if (key.kind == entry.key.kind && key != entry.key && round.entered.contains(from)) return true;
  }
  return bytes > limits_.max_open_bytes;
}

bool OpenCalls::repeats(const PeerId& from, const wire::OpState& state, bool done,
                        std::uint64_t epoch) const {
  const auto operation = operations_.find(state.key);
  if (operation == operations_.end()) return false;
  const auto known = operation->second.entries().find(from);
  if (known == operation->second.entries().end()) return false;
  const OpenOperation::Entry& entry = known->second;
  return state.attempt > epoch ||
         std::pair(state.attempt, done) <= std::pair(entry.attempt, entry.done);
}

void OpenCalls::enter(const PeerId& from, const wire::OpState& state, bool current,
                      std::size_t members, Instant now) {
  const auto [it, fresh] = operations_.try_emplace(state.key);
  OpenOperation& operation = it->second;
  if (fresh) {
    operation.opened = now;
    operation.rerun = state.rerun;
  }
  OpenOperation::Entry entry{state.signature, state.attempt, current,
                             current && state.phase == wire::OpPhase::done};
  if (operations_.size() > limits_.many_open_calls && entry.signature.text.size() > kShortText) {
    entry.signature.text = shortened(entry.signature.text, kShortText);
  }
  operation.enter(from, std::move(entry));
  if (!operation.met && operation.entries().size() == members) operation.met = now;
}

void OpenCalls::enter(const PeerId& from, const wire::RoundEntry& entry, Instant now) {
  OpenRound& round = rounds_[entry.key];
  if (round.entered.empty()) round.opened = now;
  if (!round.entered.contains(from)) round.bytes += bytes_of(entry.payload);
  round.entered[from] = entry.payload;
}

bool OpenCalls::entered(const PeerId& from, const wire::RoundKey& key) const {
  const auto it = rounds_.find(key);
  return it != rounds_.end() && it->second.entered.contains(from);
}

// -- ending

void OpenCalls::erase(const wire::CallKey& key) {
  if (const auto* operation = std::get_if<wire::OpKey>(&key)) {
    operations_.erase(*operation);
  } else {
    rounds_.erase(std::get<wire::RoundKey>(key));
  }
}

void OpenCalls::clear() {
  operations_.clear();
  rounds_.clear();
  unstick();
}

void OpenCalls::drop_member(const PeerId& id) {
  for (auto& [key, operation] : operations_) operation.drop_member(id);
  for (auto& [key, round] : rounds_) round.entered.erase(id);
}

std::vector<wire::OpKey> OpenCalls::abort_and_restart() {
  std::vector<wire::OpKey> aborted;
  for (auto it = operations_.begin(); it != operations_.end();) {
    if (it->second.rerun) {
      ++it;
      continue;
    }
    aborted.push_back(it->first);
    it = operations_.erase(it);
  }
  std::erase_if(operations_, [](const auto& item) { return item.second.entries().empty(); });
  std::erase_if(rounds_, [](const auto& item) { return item.second.entered.empty(); });
  restart();
  return aborted;
}

void OpenCalls::restart() {
  for (auto& [key, operation] : operations_) operation.restart();
  unstick();
}

// -- looking

bool OpenCalls::entered_by_all(const wire::CallKey& key, std::size_t members) const {
  if (const auto* operation = std::get_if<wire::OpKey>(&key)) {
    const auto it = operations_.find(*operation);
    return it != operations_.end() && it->second.entries().size() == members;
  }
  const auto it = rounds_.find(std::get<wire::RoundKey>(key));
  return it != rounds_.end() && it->second.entered.size() == members;
}

std::vector<wire::CallKey> OpenCalls::keys() const {
  std::vector<wire::CallKey> keys;
  for (const auto& [key, operation] : operations_) keys.emplace_back(key);
  for (const auto& [key, round] : rounds_) keys.emplace_back(key);
  return keys;
}

bool OpenCalls::busy(const PeerId& id) const {
  return std::ranges::any_of(
             operations_, [&](const auto& item) { return item.second.entries().contains(id); }) ||
         std::ranges::any_of(rounds_,
                             [&](const auto& item) { return item.second.entered.contains(id); });
}

PeerId OpenCalls::busiest() const {
  std::map<PeerId, std::size_t> counts;
  for (const auto& [key, id] : entries()) ++counts[id];
  const auto most = std::ranges::max_element(
      counts, [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == counts.end() ? PeerId{} : most->first;
}

bool OpenCalls::doubtful() const {
  return stuck_since_ || std::ranges::any_of(operations_, [](const auto& item) {
           return item.second.mismatch_since.has_value();
         });
}

std::vector<std::pair<wire::CallKey, PeerId>> OpenCalls::entries() const {
  std::vector<std::pair<wire::CallKey, PeerId>> open;
  for (const auto& [key, operation] : operations_)
    for (const auto& [id, entry] : operation.entries()) open.emplace_back(key, id);
  for (const auto& [key, round] : rounds_)
    for (const auto& [id, payload] : round.entered) open.emplace_back(key, id);
  return open;
}

std::string OpenCalls::described(const wire::CallKey& key) const {
  std::string text = wire::describe(key);
  const auto* operation = std::get_if<wire::OpKey>(&key);
  const auto found = operation == nullptr ? operations_.end() : operations_.find(*operation);
  if (found == operations_.end() || found->second.entries().empty()) return text;
  std::string what = found->second.entries().begin()->second.signature.text;
  if (what.size() > kShownOfSignature) what = shortened(what, kShownOfSignature) + "...";
  return text + " (" + what + ")";
}

std::string OpenCalls::summary() const {
  std::string text;
  for (const auto& [key, operation] : operations_) {
    text += "\n" + wire::describe(key) + ":";
    for (const auto& [id, entry] : operation.entries())
      text += " " + id.brief() + (entry.done ? "+" : "");
  }
  for (const auto& [key, round] : rounds_) {
    text += "\n" + wire::describe(key) + ":";
    for (const auto& [id, payload] : round.entered) text += " " + id.brief();
  }
  return text;
}

}  // namespace pccl::master
