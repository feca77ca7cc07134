// The group's decisions in order, until every member has applied them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <variant>
#include <vector>

#include "pccl/wire/messages.h"

namespace pccl::master {

// *one thread: the master's*
class Log {
 public:
  using Decision = std::variant<wire::EpochRecord, wire::Verdict, wire::Outcome>;

  // Adds a decision, and returns its entry. Notes the calls that it ends.
  const wire::LogEntry& append(Decision what);
  // All members have applied everything up to `least`: those entries go.
  void collect(std::uint64_t least);
  // A new group: no member has missed anything.
  void clear();
  // As a restarted master is told it. `last`: the ordinal of the newest entry.
  void restore(const std::vector<wire::LogEntry>& entries, std::uint64_t last);
  // A member may hold decisions of the master before, which no other member had reported when the
  // group was restored. They stand as long as nothing else was decided since, and unless one is an
  // epoch. `applied`: the last of them. Returns the new ones in order; empty: they cannot stand.
  [[nodiscard]] std::vector<wire::LogEntry> adoptable(const std::vector<wire::LogEntry>& entries,
                                                      std::uint64_t applied) const;
  void adopted() { restored_at_ = last_; }
  // Nothing was decided since the log was restored.
  [[nodiscard]] bool as_restored() const { return last_ == restored_at_; }

  [[nodiscard]] std::uint64_t last() const { return last_; }
  [[nodiscard]] std::uint64_t collected() const { return collected_; }
  [[nodiscard]] const std::deque<wire::LogEntry>& entries() const { return entries_; }
  [[nodiscard]] std::vector<wire::LogEntry> after(std::uint64_t ordinal) const;
  // The call was decided, and a member that has applied the log up to `applied` does not know it.
  [[nodiscard]] bool decided_after(const wire::CallKey& key, std::uint64_t applied) const {
    const auto it = decided_.find(key);
    return it != decided_.end() && it->second > applied;
  }

 private:
  void note(const wire::LogEntry& entry);

  std::deque<wire::LogEntry> entries_;  // not yet collected
  std::uint64_t last_ = 0;
  std::uint64_t collected_ = 0;
  std::uint64_t restored_at_ = 0;
  std::map<wire::CallKey, std::uint64_t> decided_;  // index of entries_: ordinals by call
};

}  // namespace pccl::master
