#include "pccl/master/decision_log.h"

#include <utility>

#include "pccl/base/overloaded.h"

namespace pccl::master {

void DecisionLog::note(const wire::LogEntry& entry) {
  std::visit(Overloaded{[&](const wire::EpochRecord& record) {
                          for (const wire::OpKey& key : record.aborted)
                            decided_[key] = entry.ordinal;
                        },
                        [&](const auto& decision) { decided_[decision.key] = entry.ordinal; }},
             entry.what);
}

const wire::LogEntry& DecisionLog::append(Decision what) {
  entries_.push_back({++last_, std::move(what)});
  note(entries_.back());
  std::visit(
      Overloaded{[&](const wire::EpochRecord& record) { aborted_ += record.aborted.size(); },
                 [&](const auto& decision) { aborted_ += decision.code == Code::ok ? 0U : 1U; }},
      entries_.back().what);
  return entries_.back();
}

void DecisionLog::collect(std::uint64_t least) {
  if (least <= collected_) return;
  collected_ = least;
  while (!entries_.empty() && entries_.front().ordinal <= collected_) entries_.pop_front();
  std::erase_if(decided_, [&](const auto& item) { return item.second <= collected_; });
}

void DecisionLog::clear() {
  entries_.clear();
  decided_.clear();
  collected_ = last_;
}

void DecisionLog::restore(const std::vector<wire::LogEntry>& entries, std::uint64_t last) {
  last_ = restored_at_ = last;
  // The report has all entries that some member lacks.
  collected_ = last - entries.size();
  for (const wire::LogEntry& entry : entries) {
    note(entry);
    entries_.push_back(entry);
  }
}

std::vector<wire::LogEntry> DecisionLog::adoptable(const std::vector<wire::LogEntry>& entries,
                                                   std::uint64_t applied) const {
  std::vector<wire::LogEntry> fresh;
  std::uint64_t next = last_ + 1;
  for (const wire::LogEntry& entry : entries) {
    if (entry.ordinal < next) continue;
    if (entry.ordinal != next++ || std::holds_alternative<wire::EpochRecord>(entry.what)) return {};
    fresh.push_back(entry);
  }
  if (next != applied + 1) return {};
  return fresh;
}

std::optional<std::uint64_t> DecisionLog::epoch_at(std::uint64_t ordinal) const {
  std::optional<std::uint64_t> epoch;
  for (const wire::LogEntry& entry : entries_) {
    const auto* record = std::get_if<wire::EpochRecord>(&entry.what);
    if (record != nullptr && entry.ordinal <= ordinal) epoch = record->epoch;
  }
  return epoch;
}

std::vector<wire::LogEntry> DecisionLog::after(std::uint64_t ordinal) const {
  std::vector<wire::LogEntry> missing;
  for (const wire::LogEntry& entry : entries_) {
    if (entry.ordinal > ordinal) missing.push_back(entry);
  }
  return missing;
}

}  // namespace pccl::master
