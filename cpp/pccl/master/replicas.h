// Replicas: a replica is one peer in each of the groups 0 to n-1, its ranks; a model is sharded
// over them, and each reduces its shard with the same rank of the others. It is let in and put out
// as a whole. Pure: groups tell what happened, `settle` acts on them.
//
// Each group comes to its admission points by itself. The first one that comes to its n-th decides
// which replicas come in there, out of those that are ready in all groups; the others let the same
// ones in at their n-th, and wait for them there if need be. So between two points the replicas of
// all groups are the same, but for those that were lost.
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
class Replicas {
 public:
  Replicas(const Options& options, const Groups& groups) : options_(options), groups_(groups) {}

  // Why a peer that says this cannot be in its group; empty: it can.
  [[nodiscard]] std::string objection(const wire::Join& join) const;
  // The same of a member that comes from another master, with what it says of its group.
  [[nodiscard]] std::string objection(const wire::Rejoin& rejoin) const;
  // Per replica; 0: there are none.
  [[nodiscard]] std::uint32_t ranks() const;

  // -- what groups tell and ask: Surroundings
  void changed() { dirty_ = true; }
  void departed(std::uint32_t group, const wire::Member& peer, const std::string& reason,
                bool member, bool finished);
  void away(std::uint32_t group, const wire::Member& peer, const std::string& reason);
  std::optional<std::vector<std::string>> to_admit(std::uint32_t group, std::uint64_t point);
  [[nodiscard]] bool wait(std::uint32_t group, std::uint64_t point) const;
  [[nodiscard]] bool started() const;
  [[nodiscard]] std::uint32_t missing() const;

  // -- what the master tells
  // A group's members come back to a master without memory. Until all groups are back, nobody comes
  // in; then those go that are not in all of them.
  void recover(std::uint32_t ranks, Instant now);
  [[nodiscard]] bool recovering() const { return recovering_since_.has_value(); }
  void on_time(Instant now);
  // After every event: what it means for the other groups. `recoveries`: of more groups some
  // members are back.
  void settle(bool recoveries, Instant now);

 private:
  struct Loss {
    std::string reason;
    bool member = false;
  };
  // Where the ranks of a replica stand, by group.
  struct Standings {
    std::vector<char> member, waiting, ready;
    std::vector<PeerId> members;               // zero: not one
    std::uint64_t joined = ~std::uint64_t{0};  // of the first
    [[nodiscard]] std::size_t count(const std::vector<char>& which) const;
    [[nodiscard]] bool all(const std::vector<char>& which) const {
      return count(which) == which.size();
    }
  };
  using Table = std::map<std::string, Standings>;

  [[nodiscard]] Table table() const;
  // Those that `fits`, the longest-waiting first.
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
  bool dirty_ = false;
  Instant now_{};                     // of the event
  std::map<std::string, Loss> lost_;  // since the latest step
  std::string dropping_;
  std::uint64_t last_point_ = 0;                                // that some group has come to
  std::map<std::uint64_t, std::vector<std::string>> admitted_;  // at points that some have not
  std::set<std::string> entering_;                              // let in, but not yet in all groups
  std::map<std::string, Instant> finishing_;                    // a rank left in good order: since
  // Newcomers whose connection is gone: since, and why.
  std::map<std::pair<std::string, std::uint32_t>, std::pair<Instant, std::string>> away_;
  std::map<std::string, Instant> incomplete_;  // ranks wait for others of theirs: since
  std::set<std::string> noticed_;
  std::optional<Instant> recovering_since_;
  std::uint32_t recovering_ranks_ = 0;
};

}  // namespace pccl::master
