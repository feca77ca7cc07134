// How the calls of a group end: verdicts, outcomes, deadlocks, stragglers.
#pragma once

#include <vector>

#include "pccl/master/decisions.h"

namespace pccl::master {

// Ends calls by Decisions. Returns the members that must be removed; the caller removes them.
// *one thread: the master's*
class CallRules {
 public:
  CallRules(const GroupContext& context, const wire::EpochRecord& record, const Peers& peers,
            const DecisionLog& log, OpenCalls& calls, Planning& planning,
            const Newcomers& newcomers, Decisions& decisions)
      : context_(context),
        record_(record),
        peers_(peers),
        log_(log),
        calls_(calls),
        planning_(planning),
        newcomers_(newcomers),
        decisions_(decisions) {}

  // Ends the call if it is due. If members are returned, the call continues without them.
  [[nodiscard]] std::vector<Departed> check(const wire::CallKey& key, Instant now);
  // Ends a call at the request of a member. REQUIRES: it is not decided.
  void abort(const PeerId& id, const wire::AbortRequest& request);
  // Ends all calls that have waiting members, if no member can proceed.
  void check_stuck(Instant now);
  // Tells members which peers they wait for, with one line for all calls that lack the same peers.
  void notice_stragglers(Instant now);
  // Returns the members that are late in a call: see wire::Patience. `frozen`: the master was, so
  // all waits begin anew.
  [[nodiscard]] std::vector<Departed> find_late(Instant now, bool frozen);
  // Returns the members for which at least half of the group has waited too long. If more than half
  // are missing, ends the call instead.
  [[nodiscard]] std::vector<Departed> end_overdue(Instant now);

 private:
  void check_operation(const wire::OpKey& key, Instant now);
  // The patience of all that have entered a call together: the longest. `needed`: how many must
  // have entered it before the grace begins; 0: nobody is ever late.
  struct Patience {
    std::size_t needed = 0;
    Duration grace{};
  };
  template <class Entered>
  [[nodiscard]] Patience patience_of(const Entered& entered) const;
  [[nodiscard]] std::vector<Departed> check_round(const wire::RoundKey& key);
  [[nodiscard]] std::vector<Departed> check_sync(const wire::RoundKey& key);
  void optimize(const wire::RoundKey& key);

  // Peers::named, also for a member that has just departed.
  [[nodiscard]] std::string named(const PeerId& id) const;

  const GroupContext& context_;
  const wire::EpochRecord& record_;
  const Peers& peers_;
  const DecisionLog& log_;
  OpenCalls& calls_;
  Planning& planning_;
  const Newcomers& newcomers_;
  Decisions& decisions_;
};

}  // namespace pccl::master
