// One master: rebuilds the groups after a restart from what returning members report, and decides
// which run goes on here if newcomers were faster than the members.
#pragma once

#include <cstdint>
#include <optional>

#include "pccl/master/replicas.h"
#include "pccl/master/returning.h"

namespace pccl::master {

// *one thread: the master's*
class Restart {
 public:
  // `around`: of the groups that are rebuilt.
  Restart(const Options& options, ServedRun& run, Connections& connections, Outbox& outbox,
          ServedGroups& served, Returning& returning, Replicas& replicas, Surroundings& around)
      : options_(options),
        run_(run),
        connections_(connections),
        outbox_(outbox),
        served_(served),
        returning_(returning),
        replicas_(replicas),
        around_(around) {}

  void on_rejoin(ConnectionId id, ControlPeer& connection, const wire::Frame& frame, Instant now);
  // Whether a newcomer of run `run` has to come again: its members may be on their way to here, or
  // its group is being rebuilt.
  [[nodiscard]] bool must_wait(std::uint64_t run, std::uint32_t group, Instant now) const;
  // Rebuilds a group once a majority of its last epoch has returned (at once if all members have)
  // and the member with the newest log has sent it.
  void rebuild_if_ready(std::uint32_t group, Instant now);
  // Decides whether the run of the formers goes on.
  void settle_formers(Instant now);

 private:
  [[nodiscard]] bool may_still_return(Instant now) const;
  void keep_former(ConnectionId id, ControlPeer& connection, Returned report,
                   const wire::Envelope& envelope, Instant now);
  [[nodiscard]] std::optional<std::uint64_t> run_that_is_back() const;
  void end_run_of_newcomers();

  const Options& options_;
  ServedRun& run_;
  Connections& connections_;
  Outbox& outbox_;
  ServedGroups& served_;
  Returning& returning_;
  Replicas& replicas_;
  Surroundings& around_;
};

}  // namespace pccl::master
