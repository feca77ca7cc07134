// What members have reported of their links, and which links the plan does without.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pccl/master/decisions.h"
#include "pccl/master/limits.h"
#include "pccl/master/peers.h"

namespace pccl::master {

// Two members, the smaller id first.
using Pair = std::pair<PeerId, PeerId>;
[[nodiscard]] inline Pair pair_of(const PeerId& a, const PeerId& b) { return std::minmax(a, b); }

// What the reports of an epoch amount to.
struct LinkFindings {
  bool reset = false;            // a link broke: what was under way on it is lost
  bool ripe = false;             // some bad link has been bad for a heartbeat interval
  std::vector<BadLink> bad;      // links that cannot be made, or over which nothing comes
  std::vector<BadLink> overdue;  // of these: for a heartbeat timeout
};

// What to do where two peers cannot reach each other. `relays`: the master relays already.
[[nodiscard]] std::string link_advice(bool relays);

// *one thread: the master's*
class LinkHealth {
 public:
  // -- reports
  // `late`: made before the reporter had heard of the present epoch. Such a report counts only
  // beside a broken control connection, as when two members are killed at once.
  // False: nothing changed.
  bool report(const PeerId& reporter, const wire::LinkReport& report, bool late, Instant now);
  void mended(const PeerId& reporter, const PeerId& about, Instant now);
  // Somebody reports trouble.
  [[nodiscard]] bool troubled() const;
  // Why a member reports its link to `about` as bad, other than a link in `except`. Null: none
  // does.
  [[nodiscard]] const std::string* reason_about(const PeerId& about,
                                                const std::set<Pair>& except) const;
  // `silent`: the master does not hear from that member either, so that the link may be fine.
  [[nodiscard]] LinkFindings findings(const std::function<bool(const PeerId&)>& silent,
                                      const Options& options, Instant now) const;
  // Of the links that have just broken, those that broke too often. Which end broke a link cannot
  // be known.
  [[nodiscard]] std::vector<BadLink> worn(const Rate& breaks, Instant now);
  // " (1a2b3c4d - 5e6f7a8b: reset by peer)" of one link in trouble; empty: there is none.
  [[nodiscard]] std::string example() const;

  // -- what is forgotten
  void begin_epoch();  // members report again what is still so
  void drop_late(Instant now);
  void clear_troubles();
  // Returns its pairs that had asked for a relay.
  [[nodiscard]] std::vector<Pair> drop_member(const PeerId& id);
  void clear() { pairs_.clear(); }

  // -- planning
  // The plan does without it. False: it did already.
  bool avoid(const Pair& pair) { return !std::exchange(pairs_[pair].unusable, true); }
  // It did not come about through the master either. False: that was known.
  bool avoid_relaying(const Pair& pair) { return !std::exchange(pairs_[pair].unrelayable, true); }
  void use(const Pair& pair) { pairs_[pair].unusable = false; }
  void relay(const Pair& pair) { pairs_[pair].unrelayable = false; }
  void use_all();  // no plan avoids all of them: every link is tried again
  [[nodiscard]] std::set<Pair> unusable() const;
  [[nodiscard]] std::set<Pair> unrelayable() const;
  // No plan does without these together, until the next epoch.
  void set_unavoidable(const std::set<Pair>& pairs);
  [[nodiscard]] bool unavoidable(const std::set<Pair>& pairs) const;

  // -- relays: pairs that have asked this master for one
  void want_relay(const Pair& pair) { pairs_[pair].relay_wanted = true; }
  // Pairs that had asked, and are relayed no more.
  [[nodiscard]] std::vector<Pair> end_relays(const std::set<Pair>& relayed);

 private:
  struct Trouble {
    wire::LinkState state = wire::LinkState::broken;
    Instant since{};
    std::string reason;  // empty: there is no trouble
    bool late = false;
    bool broke = false;  // what was under way on it is lost, even if it is up again
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
