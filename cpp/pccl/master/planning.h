// The plan of a group: chosen from memory sharing, usable links and their rates.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pccl/master/link_health.h"
#include "pccl/master/peers.h"
#include "pccl/topology/choose.h"
#include "pccl/topology/plan.h"

namespace pccl::master {

// A plan, the rates from which it was chosen, and the pairs that may be relayed.
struct Draft {
  topology::Choice choice;
  wire::RateTable rates;
  std::vector<wire::RankPair> relayed;
};

// *one thread: the master's*
class Planning {
 public:
  Planning(const Options& options, const Peers& peers, const LinkHealth& links)
      : options_(options), peers_(peers), links_(links) {}

  // -- plans
  // The best plan for the present members, hosts, links and rates. `record`: the epoch of the known
  // rates. The plan uses relays only if there is no other plan. Transfers of shared state may use
  // relays of further unusable links. Empty: no plan avoids the unusable links, even with relays.
  [[nodiscard]] std::optional<Draft> draft(const wire::EpochRecord& record);
  // Enters the plan into `record`. Returns the reason for the choice, for the log.
  std::string take(Draft draft, wire::EpochRecord& record);
  // The reason for the present plan; empty: it was the only one.
  [[nodiscard]] const std::string& why() const { return why_; }
  // Rates between the members of the last epoch.
  [[nodiscard]] const wire::RateTable& rates() const { return rates_; }
  // Whether draft() would find a plan for a group of `world` members.
  [[nodiscard]] bool exists(std::size_t world, const std::set<topology::Edge>& unusable,
                            const std::set<topology::Edge>& unrelayable) const;
  // Whether a plan with this newcomer exists that avoids the links which it cannot establish.
  [[nodiscard]] bool fits(const Peer& newcomer) const;
  // The pairs whose ends are both members, by rank.
  [[nodiscard]] std::set<topology::Edge> ranks_of(const std::set<Pair>& pairs) const;

  // -- memory sharing
  // Members or their memory sharing have changed.
  void forget_hosts() { hosts_.reset(); }
  // The host number of each rank.
  [[nodiscard]] const std::vector<std::uint32_t>& hosts();
  // Whether to plan again because memory sharing differs from the plan's: once it is settled, or
  // after a heartbeat interval.
  [[nodiscard]] bool hosts_due(const wire::EpochRecord& record, Instant now);

  // -- rates of links
  // From a report to a restarted master.
  void restore_rates(const wire::RateTable& rates) { rates_ = rates; }
  void measured(std::size_t rank, const wire::Measurements& row, const wire::RateTable& planned);
  [[nodiscard]] bool rates_differ(const wire::RateTable& planned) const {
    return rates_ != planned;
  }
  // Returns a plan that was clearly better at two looks in a row, since one may be chance. Once all
  // delays of hosts are known, one look is enough.
  // REQUIRES: look_due(); no operation runs, or early(); and no link is in trouble.
  [[nodiscard]] std::optional<Draft> better(const wire::EpochRecord& record, Instant now);
  [[nodiscard]] bool look_due(Instant now) const {
    return rates_moved_ && (look_now_ || now - looked_ >= options_.replan_interval);
  }
  // Members were admitted so recently that an operation may start over for a better plan.
  void admitted(Instant now) { admitted_at_ = now; }
  [[nodiscard]] bool early(Instant now) const {
    return look_now_ && admitted_at_ && now - *admitted_at_ < kEarly;
  }

  // -- measuring
  void operation_took(Duration taken) {
    if (options_.measure_after > Duration::zero() && taken >= options_.measure_after) slow_ = true;
  }
  void begin_group() { slow_ = false; }
  // Whether members are on several hosts, operations are slow, and some member's up-link rate is
  // unknown. At most once per admission: measuring takes some seconds and may fail.
  [[nodiscard]] bool measuring_helps(std::uint64_t admission);
  void asked_to_measure(std::uint64_t admission) {
    asked_in_ = admission;
    slow_ = false;
  }

 private:
  // Connections of new members are made, and their round trips reported, within this time.
  static constexpr Duration kEarly = std::chrono::seconds(2);

  const Options& options_;
  const Peers& peers_;
  const LinkHealth& links_;
  // Rates between the members of the last epoch; that epoch's record has those of its plan.
  wire::RateTable rates_;
  std::string why_;
  bool rates_moved_ = false;  // since the last look
  bool better_ = false;       // at the last look
  bool look_now_ = false;     // the delays of all pairs have become known
  Instant looked_{};
  std::optional<Instant> admitted_at_;               // the last admission; empty: by another master
  std::optional<std::vector<std::uint32_t>> hosts_;  // cached: computed from all pairs
  std::optional<Instant> hosts_differ_since_;        // from the plan's
  bool slow_ = false;
  std::uint64_t asked_in_ = 0;  // an admission
};

}  // namespace pccl::master
