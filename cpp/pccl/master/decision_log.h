// The group's decisions in order. Kept until every member has applied them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <variant>
#include <vector>

#include "pccl/wire/messages.h"

namespace pccl::master {

// *one thread: the master's*
class DecisionLog {
 public:
  using Decision = std::variant<wire::EpochRecord, wire::Verdict, wire::Outcome>;

  // Adds a decision and returns its entry. Remembers the calls that it ends.
  const wire::LogEntry& append(Decision what);
  // Calls that ended with an error since this master began.
  [[nodiscard]] std::uint64_t aborted() const { return aborted_; }
  // Drops entries up to `least`, which all members have applied.
  void collect(std::uint64_t least);
  // Begins a new group: no member lacks an entry.
  void clear();
  // Restores the log from a report to a restarted master. `last`: ordinal of the newest entry.
  void restore(const std::vector<wire::LogEntry>& entries, std::uint64_t last);
  // A member may hold decisions of the previous master that nobody had reported when the group was
  // restored. They are valid if nothing was decided since and none of them is an epoch. `applied`:
  // ordinal of the last one. Returns the new entries in order. Empty: they are not valid.
  [[nodiscard]] std::vector<wire::LogEntry> adoptable(const std::vector<wire::LogEntry>& entries,
                                                      std::uint64_t applied) const;
  void adopted() { restored_at_ = last_; }
  // The last entry that the master before this one has made.
  [[nodiscard]] std::uint64_t restored_at() const { return restored_at_; }
  // Whether nothing was decided since the log was restored.
  [[nodiscard]] bool as_restored() const { return last_ == restored_at_; }

  [[nodiscard]] std::uint64_t last() const { return last_; }
  [[nodiscard]] std::uint64_t collected() const { return collected_; }
  [[nodiscard]] const std::deque<wire::LogEntry>& entries() const { return entries_; }
  // The epoch in force after this entry. Empty: no epoch of this log is known to be at or before
  // it.
  [[nodiscard]] std::optional<std::uint64_t> epoch_at(std::uint64_t ordinal) const;
  [[nodiscard]] std::vector<wire::LogEntry> after(std::uint64_t ordinal) const;
  // Whether the call was decided by an entry after `applied`, the last entry that a member has
  // applied.
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
  std::uint64_t aborted_ = 0;
  std::map<wire::CallKey, std::uint64_t> decided_;  // index of entries_: ordinals by call
};

}  // namespace pccl::master
