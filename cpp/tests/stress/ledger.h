// What all workers of a group say of its operations, the dead ones included: one verdict each, and
// the same bytes.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <stdexcept>

#include "tests/stress/shared.h"

namespace pccl::stress {

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Totals {
  std::uint64_t committed = 0;
  std::uint64_t rerun = 0;
  std::uint64_t failed = 0;
  std::uint64_t counted = 0;  // large enough, and committed at once, ...
  std::uint64_t in_memory = 0;
  // How those ended in which somebody was killed or frozen, by how many were.
  std::uint64_t hit_with = 0;     // committed, with it
  std::uint64_t hit_without = 0;  // run again among the others
  std::uint64_t hit_failed = 0;
};

// *one thread*
class Ledger {
 public:
  void add(const Event& event);
  // No more events of that peer. `inside`: the operation it was in.
  void ended(const PeerId& peer, const std::optional<Key>& inside);
  // ... because it was hit there.
  void cut(const PeerId& peer, const Key& inside) { hit_[inside].insert(peer); }
  // Operations of earlier admissions are forgotten, once all that were in them have said how they
  // ended, or have ended there.
  void settle(std::uint64_t admission);
  // All have ended.
  void close();

  [[nodiscard]] std::uint64_t newest() const { return newest_; }  // admission
  [[nodiscard]] const Totals& totals() const { return totals_; }

 private:
  struct Operation {
    Event first;
    std::set<PeerId> heard;
  };
  [[nodiscard]] bool complete(const Key& key, const Operation& operation) const;

  std::map<Key, Operation> operations_;
  std::map<PeerId, Key> latest_;  // that it has spoken of
  std::map<PeerId, std::optional<Key>> ended_;
  std::map<Key, std::set<PeerId>> hit_;
  Totals totals_;
  std::uint64_t newest_ = 0;
};

}  // namespace pccl::stress
