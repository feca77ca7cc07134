// The links between members: reports of trouble, and the links that plans avoid.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pccl/master/judgements.h"
#include "pccl/master/limits.h"
#include "pccl/master/peers.h"
#include "pccl/wire/status.h"

namespace pccl::master {

// Two members, the smaller id first.
using Pair = std::pair<PeerId, PeerId>;
[[nodiscard]] inline Pair pair_of(const PeerId& a, const PeerId& b) { return std::minmax(a, b); }
// The pairs whose links go through the master in this epoch.
[[nodiscard]] std::set<Pair> relayed_pairs(const wire::EpochRecord& record);

// A summary of the reports in an epoch.
struct LinkFindings {
  bool reset = false;            // a link broke: its data in flight is lost
  bool ripe = false;             // a link has been bad for long enough to plan without it
  std::vector<BadLink> bad;      // links that are unreachable or silent
  std::vector<BadLink> overdue;  // bad links that have been so for a heartbeat timeout
};

// Advice for the user when two peers cannot reach each other. `relays`: the master relays already.
[[nodiscard]] std::string link_advice(bool relays);

// *one thread: the master's*
class LinkHealth {
 public:
  // -- reports
  // `late`: the reporter did not know the present epoch. Such a report counts only together with a
  // broken control connection, as when two members are killed at once. False: nothing changed.
  bool report(const PeerId& reporter, const wire::LinkReport& report, bool late, Instant now);
  void mended(const PeerId& reporter, const PeerId& about, Instant now);
  [[nodiscard]] bool troubled() const;
  // The reason of a report about a link to `about`, except for links in `except`. Null: no report.
  [[nodiscard]] const std::string* reason_about(const PeerId& about,
                                                const std::set<Pair>& except) const;
  // `silent(member)`: the master does not hear from the member either, so the link may be fine.
  [[nodiscard]] LinkFindings findings(const std::function<bool(const PeerId&)>& silent,
                                      const Options& options, Instant now) const;
  // The links that have just broken and have broken too often. The master cannot know which end
  // broke a link.
  [[nodiscard]] std::vector<BadLink> worn(const Rate& breaks, Instant now);
  // All that is known about links, by (from, to): at most `most` entries.
  struct Finding {
    wire::LinkCondition condition = wire::LinkCondition::ok;
    std::string reason;
  };
  [[nodiscard]] std::map<std::pair<PeerId, PeerId>, Finding> all(const std::set<Pair>& relayed,
                                                                 std::size_t most) const;
  // " (trainer-1 - trainer-2: reset by peer)" for one link in trouble. Empty: there is none.
  [[nodiscard]] std::string example(const Peers& peers) const;

  // -- forgetting
  void begin_epoch();  // members repeat the reports that still hold
  void drop_late(Instant now);
  void clear_troubles();
  // Returns its pairs that had asked for a relay.
  [[nodiscard]] std::vector<Pair> drop_member(const PeerId& id);
  void clear() { pairs_.clear(); }

  // -- planning
  // Makes plans avoid this link. False: they already did.
  bool avoid(const Pair& pair) { return !std::exchange(pairs_[pair].unusable, true); }
  // Excludes the link from relaying. False: it already was.
  bool avoid_relaying(const Pair& pair) { return !std::exchange(pairs_[pair].unrelayable, true); }
  void use(const Pair& pair) { pairs_[pair].unusable = false; }
  void relay(const Pair& pair) { pairs_[pair].unrelayable = false; }
  void use_all();  // no plan avoids all unusable links: try all links again
  [[nodiscard]] std::set<Pair> unusable() const { return pairs_with(&Health::unusable); }
  [[nodiscard]] std::set<Pair> unrelayable() const { return pairs_with(&Health::unrelayable); }
  // Records that no plan avoids all of these links. Valid until the next epoch.
  void set_unavoidable(const std::set<Pair>& pairs);
  [[nodiscard]] bool unavoidable(const std::set<Pair>& pairs) const {
    return pairs_with(&Health::unavoidable) == pairs;
  }

  // -- relays
  void want_relay(const Pair& pair) { pairs_[pair].relay_wanted = true; }
  // Returns the pairs that had asked for a relay and are not in `relayed` any more.
  [[nodiscard]] std::vector<Pair> end_relays(const std::set<Pair>& relayed);

 private:
  struct Trouble {
    wire::LinkState state = wire::LinkState::broken;
    Instant since{};
    std::string reason;  // empty: there is no trouble
    bool late = false;
    bool broke = false;  // data in flight was lost, even if the link works again
  };
  struct Health {
    Trouble of_first;   // as the first of the pair reports
    Trouble of_second;  // as the second reports
    Allowance breaks;
    bool unusable = false;
    bool unrelayable = false;
    bool unavoidable = false;
    bool relay_wanted = false;
  };
  [[nodiscard]] std::set<Pair> pairs_with(bool Health::*flag) const;
  [[nodiscard]] Trouble& trouble(const PeerId& reporter, const PeerId& about) {
    Health& health = pairs_[pair_of(reporter, about)];
    return reporter < about ? health.of_first : health.of_second;
  }
  template <class Use>  // use(trouble, reporter, about)
  void each_trouble(const Use& use) const {
    for (const auto& [pair, health] : pairs_) {
      if (!health.of_first.reason.empty()) use(health.of_first, pair.first, pair.second);
      if (!health.of_second.reason.empty()) use(health.of_second, pair.second, pair.first);
    }
  }

  std::map<Pair, Health> pairs_;
};

}  // namespace pccl::master
