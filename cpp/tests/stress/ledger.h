// The reports of all workers of a group, including dead ones, about its operations: they must agree
// on verdicts and bytes.
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
  std::uint64_t counted = 0;  // not tiny, and committed in the first attempt
  std::uint64_t in_memory = 0;
  // How operations with killed or frozen workers ended.
  std::uint64_t hit_with = 0;     // committed, with the worker
  std::uint64_t hit_without = 0;  // run again among the others
  std::uint64_t hit_failed = 0;
};

// *one thread*
class Ledger {
 public:
  void add(const Event& event);
  // The peer has no more events. `inside`: the operation in which it ended.
  void ended(const PeerId& peer, const std::optional<Key>& inside);
  // The peer was killed or frozen in this operation.
  void cut(const PeerId& peer, const Key& inside) { hit_[inside].insert(peer); }
  // Drops operations of earlier admissions once all their members have reported their end, or have
  // ended in them.
  void settle(std::uint64_t admission);
  // All workers have ended. Checks the operations that are left.
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
  std::map<PeerId, Key> latest_;  // that the peer has reported
  std::map<PeerId, std::optional<Key>> ended_;
  std::map<Key, std::set<PeerId>> hit_;
  Totals totals_;
  std::uint64_t newest_ = 0;
};

}  // namespace pccl::stress
