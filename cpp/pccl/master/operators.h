// The operators of a run, who join nothing: they ask for its status, and give commands.
#pragma once

#include "pccl/base/allowance.h"
#include "pccl/master/served_groups.h"
#include "pccl/wire/status.h"

namespace pccl::master {

// *one thread: the master's*
class Operators {
 public:
  Operators(const Options& options, ServedRun& run, Connections& connections, Outbox& outbox,
            ServedGroups& served)
      : options_(options), run_(run), connections_(connections), outbox_(outbox), served_(served) {}

  void on_question(ConnectionId id, ControlPeer& connection, Instant now);
  void on_command(ConnectionId id, ControlPeer& connection, const wire::Command& command,
                  Instant now);
  // The status of the run: the facts that the tables of its groups have.
  [[nodiscard]] wire::RunStatus status(Instant now) const;

 private:
  [[nodiscard]] wire::CommandResult carry_out(const wire::Command& command, Instant now);
  [[nodiscard]] wire::CommandResult pause_admission(bool pause, Instant now);

  const Options& options_;
  ServedRun& run_;
  Connections& connections_;
  Outbox& outbox_;
  ServedGroups& served_;
  Allowance questions_;  // for the status
  Allowance commands_;
};

}  // namespace pccl::master
