// Makes the decisions of a group: verdicts, outcomes and epochs. Each is an entry of the log, which
// is sent to all members.
#pragma once

#include <string>
#include <vector>

#include "pccl/master/decision_log.h"
#include "pccl/master/link_health.h"
#include "pccl/master/newcomers.h"
#include "pccl/master/open_calls.h"
#include "pccl/master/peers.h"
#include "pccl/master/planning.h"
#include "pccl/master/surroundings.h"

namespace pccl::master {

// *one thread: the master's*
class Decisions {
 public:
  Decisions(const GroupContext& context, wire::EpochRecord& record, Peers& peers, DecisionLog& log,
            OpenCalls& calls, LinkHealth& links, Planning& planning, Newcomers& newcomers)
      : context_(context),
        record_(record),
        peers_(peers),
        log_(log),
        calls_(calls),
        links_(links),
        planning_(planning),
        newcomers_(newcomers) {}

  // -- calls
  // Ends a call for all members, including those that enter it later.
  void decide(const wire::CallKey& key, Code code, const PeerId& culprit, const std::string& reason,
              const std::string& waiting, const wire::SyncDecision& sync = {});

  // -- epochs
  // Begins a group of these members.
  void start(std::vector<Peer> founders);
  // Admits newcomers: the ranks of these replicas in this order, or without replicas all that are
  // ready. REQUIRES: all members are in the same call.
  void admit(wire::RoundKind kind, const std::vector<std::string>& replicas);
  // Members are gone: operations that do not run again end.
  void lose(std::vector<wire::Departure> departures);
  // Both ends of a broken link live. Its data in flight is lost, so operations start over while the
  // link is established again.
  void reset_links();
  // Begins an epoch in which operations in progress start over. REQUIRES: plan_epoch() succeeded.
  void start_over();

  // Begins the term of a master that has taken over. Entries of one epoch are all of one master.
  void begin_term();

  // -- plans
  // Plans the next epoch for the present members. False: no plan avoids the unusable links.
  bool plan_epoch();
  // Plans again when memory sharing has changed.
  void check_plan(Instant now);
  // Plans again when transfers have shown other rates. Waits until no operation runs: an epoch
  // restarts operations, a long one perhaps many times. Waits until no link is in trouble: an epoch
  // restarts the times of reports.
  void reconsider_plan(Instant now);

  // When the present epoch began.
  [[nodiscard]] Instant epoch_began() const { return epoch_began_; }

  // -- the log
  // Drops the entries that all members have applied.
  void collect_log();
  // Sends a member the log entries after ordinal `after`.
  void send_log(const Peer& to, std::uint64_t after);
  // Adopts decisions of the previous master that only one member holds. False: they are not valid.
  bool adopt(const std::vector<wire::LogEntry>& log, std::uint64_t applied);

 private:
  void append(DecisionLog::Decision what);
  void begin_epoch(wire::Cause cause, std::vector<wire::Departure> departures = {},
                   std::vector<wire::OpKey> aborted = {});
  void begin_loss(std::vector<wire::Departure> departures);
  void plan_or_use_all();
  void take_plan(Draft draft);
  [[nodiscard]] bool measure_at(const wire::RoundKey& key);

  const GroupContext& context_;
  wire::EpochRecord& record_;  // of the present epoch, with the outcomes since
  Peers& peers_;
  DecisionLog& log_;
  OpenCalls& calls_;
  LinkHealth& links_;
  Planning& planning_;
  Newcomers& newcomers_;
  Instant epoch_began_{};
};

}  // namespace pccl::master
