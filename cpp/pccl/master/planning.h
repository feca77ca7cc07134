// Which plan the group has: chosen from who shares memory, which links work, and how fast they are.
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

// A plan, what it was chosen from, and which links of it, and beside it, may be relayed.
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
  // The best plan for what is known at present. `record`: the epoch from which rates are known.
  // Links are relayed only where there is no other plan. Empty: no plan does without the unusable
  // links, even if those are relayed that may be.
  [[nodiscard]] std::optional<Draft> draft(const wire::EpochRecord& record);
  // Makes it the plan of the next epoch. Returns why it was chosen, for the log.
  std::string take(Draft draft, wire::EpochRecord& record);
  // As draft() would find, for a group of `world` members.
  [[nodiscard]] bool exists(std::size_t world, const std::set<topology::Edge>& unusable,
                            const std::set<topology::Edge>& unrelayable) const;
  // The pairs whose ends are both members, by rank.
  [[nodiscard]] std::set<topology::Edge> ranks_of(const std::set<Pair>& pairs) const;

  // -- who shares memory
  // Members or what they share has changed.
  void forget_hosts() { hosts_.reset(); }
  // By rank: a number for each host.
  [[nodiscard]] const std::vector<std::uint32_t>& hosts();
  // The members share memory in another way than the plan has it. True when the group is to be
  // planned for that: all know with whom they share, or a heartbeat interval has passed.
  [[nodiscard]] bool hosts_due(const wire::EpochRecord& record, Instant now);

  // -- how fast links are
  void clear_rates() { rates_ = {}; }
  // As a restarted master is told them.
  void restore_rates(const wire::RateTable& rates) { rates_ = rates; }
  void measured(std::size_t rank, const wire::Measurements& row, const wire::RateTable& planned);
  [[nodiscard]] bool rates_differ(const wire::RateTable& planned) const {
    return rates_ != planned;
  }
  // Transfers have shown something new, and it is time for a look. Returns a plan that was clearly
  // better at two looks in a row: what is better once may be chance. REQUIRES: no operation runs,
  // and no link is in trouble.
  [[nodiscard]] std::optional<Draft> better(const wire::EpochRecord& record, Instant now);
  [[nodiscard]] bool look_due(Instant now) const {
    return rates_moved_ && now - looked_ >= options_.replan_interval;
  }

  // -- whether members should measure
  void operation_took(Duration taken) {
    if (options_.measure_after > Duration::zero() && taken >= options_.measure_after) slow_ = true;
  }
  void begin_group() { slow_ = false; }
  // Operations are slow, and nobody knows how fast some link between hosts is. Asked for once after
  // each admission: measuring takes some seconds, and may fail to find out.
  [[nodiscard]] bool measuring_helps(std::uint64_t admission);
  void asked_to_measure(std::uint64_t admission) {
    asked_in_ = admission;
    slow_ = false;
  }

 private:
  const Options& options_;
  const Peers& peers_;
  const LinkHealth& links_;
  // Rates between the members of the last epoch; that epoch's record has those of its plan.
  wire::RateTable rates_;
  bool rates_moved_ = false;  // since the last look
  bool better_ = false;       // at the last look
  Instant looked_{};
  std::optional<std::vector<std::uint32_t>> hosts_;  // computed once: all pairs are looked at
  std::optional<Instant> hosts_differ_since_;        // from the plan's
  bool slow_ = false;
  std::uint64_t asked_in_ = 0;  // an admission
};

}  // namespace pccl::master
