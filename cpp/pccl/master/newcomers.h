// The newcomers of a group: which peers join, which can be admitted, and what newcomers and members
// are told about each other. Decisions admit them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "pccl/master/decision_log.h"
#include "pccl/master/link_health.h"
#include "pccl/master/peers.h"
#include "pccl/master/planning.h"
#include "pccl/master/surroundings.h"

namespace pccl::master {

// *one thread: the master's*
class Newcomers {
 public:
  Newcomers(const GroupContext& context, const wire::EpochRecord& record, Peers& peers,
            const DecisionLog& log, LinkHealth& links, const Planning& planning)
      : context_(context),
        record_(record),
        peers_(peers),
        log_(log),
        links_(links),
        planning_(planning) {}

  // -- joining and leaving
  // Welcomes a newcomer. `seal`: of its ticket. False: it was refused.
  bool add(ConnectionId connection, const wire::Join& join, const Seal& seal,
           const std::string& seen, Instant now);
  // Warns a peer whose replica has the name of another one.
  void warn_namesake(ConnectionId connection);
  // Removes a newcomer from the list, and returns it. Invalidates `newcomer`.
  wire::Member drop(const Peer& newcomer);
  // Sends the newcomers of a replica a line for the user's log.
  void tell(const std::string& replica, const std::string& text);

  // Tells a newcomer that waits that admission is paused, if it is.
  void tell_paused(const Peer& newcomer) const;
  // The operator has paused or resumed admission.
  void admission_changed() const;

  // -- founding. Founders are taken from the list.
  // All newcomers that wait, once they are as many as the largest min_peers among them. Empty: they
  // are too few. REQUIRES: there are no members and no replicas.
  [[nodiscard]] std::vector<Peer> take_founders();
  // One waiting newcomer of each replica.
  [[nodiscard]] std::vector<Peer> take_founders(const std::vector<std::string>& replicas);
  // Newcomers that only wanted to found the group stop waiting: it has started without them.
  void leave_behind();
  // The group has started. Tells a peer that it has started alone although another one has just
  // left.
  void founded(Instant now);
  void peer_left(Instant now) { others_at_ = now; }

  // -- admission
  [[nodiscard]] bool ready(const Peer& candidate) const;
  // Whether some newcomer can be admitted, or with replicas a whole replica.
  [[nodiscard]] bool any_ready() const;
  // The newcomer has links to all members of the prepared epoch except those in `without`.
  void prepared(Peer& newcomer, const wire::Prepared& prepared);
  [[nodiscard]] wire::Expect expected() const;
  // Tells newcomers which members to connect to, and members which newcomers to expect.
  void announce() const;
  // Makes newcomers members: the ready ranks of these replicas in this order, or without replicas
  // all that are ready and fit.
  void enter(const std::vector<std::string>& replicas);

  // The number of peers or replicas that must still join before the group can start.
  [[nodiscard]] std::uint32_t missing() const;
  // Whether its links to all members of the present epoch are up, except those that cannot be.
  [[nodiscard]] bool connected(const Peer& candidate) const {
    return candidate.waiting && candidate.connection != 0 &&
           candidate.prepared_epoch == record_.epoch;
  }

 private:
  [[nodiscard]] std::optional<std::string> refusal_of(const wire::Join& join,
                                                      const Seal& seal) const;
  void tell_lone_founder(Instant now);

  const GroupContext& context_;
  const wire::EpochRecord& record_;
  Peers& peers_;
  const DecisionLog& log_;
  LinkHealth& links_;
  const Planning& planning_;
  std::optional<Instant> alone_since_;  // set until a lone founder is notified
  std::optional<Instant> others_at_;    // when a peer last departed
};

}  // namespace pccl::master
