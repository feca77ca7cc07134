// What all workers of a group say of its operations, the dead ones included: one verdict each, and
// the same bytes.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <stdexcept>

#include "stress/shared.h"

namespace pccl::stress {

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// How the operations ended in which somebody was killed or frozen.
struct Cuts {
  std::uint64_t with = 0;     // committed, with it
  std::uint64_t without = 0;  // run again among the others
  std::uint64_t given_up = 0;
};

// *one thread*
class Ledger {
 public:
  void add(const Event& event);
  // No more events of that peer. `inside`: the operation it was in.
  void ended(const PeerId& peer, const std::optional<Key>& inside);
  // ... because it was hit there.
  void cut(const PeerId& peer, const Key& inside) { hit_[inside].insert(peer); }
  // Operations of earlier admissions are over: who was in them has said so, or has ended there.
  void settle(std::uint64_t admission);

  [[nodiscard]] std::uint64_t newest() const { return newest_; }  // admission
  [[nodiscard]] std::uint64_t committed() const { return committed_; }
  [[nodiscard]] std::uint64_t rerun() const { return rerun_; }
  [[nodiscard]] std::uint64_t failed() const { return failed_; }
  [[nodiscard]] const Cuts& cuts() const { return cuts_; }

 private:
  struct Operation {
    Event first;
    std::set<PeerId> heard;
  };
  std::map<Key, Operation> operations_;
  std::map<PeerId, std::optional<Key>> ended_;
  std::map<Key, std::set<PeerId>> hit_;
  Cuts cuts_;
  std::uint64_t newest_ = 0;
  std::uint64_t committed_ = 0;
  std::uint64_t rerun_ = 0;
  std::uint64_t failed_ = 0;
};

}  // namespace pccl::stress
