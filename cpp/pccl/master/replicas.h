// Replicas. A replica has one peer, a rank, in each of the groups 0 to n - 1. A model is sharded
// over the ranks, and each rank reduces its shard with the same rank of the other replicas. A
// replica is admitted and removed as a whole. Pure: groups report events, and `settle` acts on
// them.
//
// Each group reaches its admission points by itself. The first group that reaches its n-th point
// decides which replicas are admitted there, among those that are ready in all groups. The other
// groups admit the same replicas at their n-th point, and wait for them there if necessary. Between
// two points all groups have the same replicas, except for lost ones.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pccl/master/group.h"

namespace pccl::master {

using Groups = std::map<std::uint32_t, std::unique_ptr<Group>>;

// *one thread: the master's*
class Replicas final : public ReplicaRules {
 public:
  // `admission_paused`: no replica is admitted at points that no group has reached.
  Replicas(const Options& options, const Groups& groups, const bool& admission_paused)
      : options_(options), groups_(groups), admission_paused_(admission_paused) {}

  [[nodiscard]] std::string objection(const wire::Join& join) const override;
  // Why a member of another master cannot return here. Empty: it can.
  [[nodiscard]] std::string objection(const wire::Rejoin& rejoin) const;
  // Ranks per replica; 0: there are no replicas.
  [[nodiscard]] std::uint32_t ranks() const;

  // -- events and questions of groups
  void changed() override { dirty_ = true; }
  void departed(std::uint32_t group, const wire::Member& peer, const std::string& reason,
                bool member, bool finished) override;
  void away(std::uint32_t group, const wire::Member& peer, const std::string& reason) override;
  std::optional<std::vector<std::string>> to_admit(std::uint32_t group,
                                                   std::uint64_t point) override;
  [[nodiscard]] bool wait(std::uint32_t group, std::uint64_t point) const override;
  [[nodiscard]] bool started() const override;
  [[nodiscard]] std::uint32_t missing() const override;

  // -- events of the master
  // Members return to a restarted master. Until all groups are rebuilt no replica is admitted;
  // afterwards replicas that are not in all groups are removed.
  void recover(std::uint32_t ranks, Instant now);
  [[nodiscard]] bool recovering() const { return recovering_since_.has_value(); }
  // All groups have ended.
  void forget_all();
  void on_time(Instant now);
  // Called after every event: applies its consequences to all groups. `recoveries`: more groups are
  // being rebuilt.
  void settle(bool recoveries, Instant now);

 private:
  struct Loss {
    std::string reason;
    bool member = false;
  };
  // The ranks of a replica, by group.
  struct Standings {
    std::vector<char> member, waiting, ready;
    std::vector<PeerId> members;               // zero: not a member
    std::uint64_t joined = ~std::uint64_t{0};  // of the first rank
    [[nodiscard]] std::size_t count(const std::vector<char>& which) const;
    [[nodiscard]] bool all(const std::vector<char>& which) const {
      return count(which) == which.size();
    }
  };
  using Table = std::map<std::string, Standings>;

  [[nodiscard]] Table table() const;
  // The replicas for which `fits` holds, the longest-waiting first.
  template <class Fits>
  [[nodiscard]] static std::vector<std::string> pick(const Table& table, const Fits& fits);
  [[nodiscard]] std::vector<std::string> ready() const;
  [[nodiscard]] std::vector<std::string> founders(std::uint32_t& wanted) const;
  void step(Instant now);
  void end_recovery(bool recoveries, Instant now);
  void drop(const std::string& replica, const Loss& loss, Instant now);
  void drop_incomplete(Instant now);
  void start_if_ready();
  void forget(const std::string& replica);
  void reset();

  const Options& options_;
  const Groups& groups_;
  const bool& admission_paused_;
  bool dirty_ = false;
  Instant now_{};                     // of the latest event
  std::map<std::string, Loss> lost_;  // since the latest step
  std::string dropping_;
  std::uint64_t last_point_ = 0;                                // the last that a group has reached
  std::map<std::uint64_t, std::vector<std::string>> admitted_;  // by point not yet passed by all
  std::set<std::string> entering_;                              // admitted, but not in all groups
  std::map<std::string, Instant> finishing_;                    // since a rank left regularly
  // Newcomers that disconnected or withdrew: since when, and why.
  std::map<std::pair<std::string, std::uint32_t>, std::pair<Instant, std::string>> away_;
  std::map<std::string, Instant> incomplete_;  // ranks wait for missing ranks: since when
  std::set<std::string> noticed_;
  std::optional<Instant> recovering_since_;
  std::uint32_t recovering_ranks_ = 0;
};

}  // namespace pccl::master
