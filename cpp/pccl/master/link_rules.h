// How a group handles links that do not work: operations start over, a plan avoids the link, or
// members are removed.
#pragma once

#include <vector>

#include "pccl/master/decisions.h"

namespace pccl::master {

// Begins epochs by Decisions. Returns the members that must be removed; the caller removes them.
// *one thread: the master's*
class LinkRules {
 public:
  LinkRules(const GroupContext& context, const wire::EpochRecord& record, const Peers& peers,
            LinkHealth& links, const Planning& planning, Decisions& decisions)
      : context_(context),
        record_(record),
        peers_(peers),
        links_(links),
        planning_(planning),
        decisions_(decisions) {}

  // A member's report about its link to another member. True: check() must follow.
  [[nodiscard]] bool report(const PeerId& id, const wire::LinkReport& report, Instant now);
  // Acts on the reports that are due. If members are returned, no epoch has begun.
  [[nodiscard]] std::vector<Departed> check(Instant now);

 private:
  [[nodiscard]] bool plan_around(const std::vector<BadLink>& bad);
  [[nodiscard]] std::vector<Departed> evict_for_links(const std::vector<BadLink>& bad,
                                                      std::vector<BadLink> overdue);

  const GroupContext& context_;
  const wire::EpochRecord& record_;
  const Peers& peers_;
  LinkHealth& links_;
  const Planning& planning_;
  Decisions& decisions_;
};

}  // namespace pccl::master
