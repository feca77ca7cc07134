// Several masters: a master serves groups while a majority supports it, takes over groups of a
// master that is gone, and gives way if more members come from another side.
// docs/internals/several-masters.md has the rules.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "pccl/base/allowance.h"
#include "pccl/master/epoch_claims.h"
#include "pccl/master/returning.h"

namespace pccl::master {

// *one thread: the master's*
class Takeover {
 public:
  // `around`: of the groups that this master takes over.
  Takeover(const Options& options, ServedRun& run, Connections& connections, Outbox& outbox,
           ServedGroups& served, Returning& returning, Surroundings& around)
      : options_(options),
        run_(run),
        connections_(connections),
        outbox_(outbox),
        served_(served),
        returning_(returning),
        around_(around) {}

  // -- the first messages of a connection
  void on_join(ConnectionId id, ControlPeer& connection, const wire::Frame& frame, Instant now);
  void on_rejoin(ConnectionId id, ControlPeer& connection, const wire::Frame& frame, Instant now);
  void on_promise(ConnectionId id, ControlPeer& connection, const wire::Frame& frame, Instant now);

  // -- time
  // Abandons groups, or steps down, where a majority cannot be reached.
  void check_quorums(Instant now);
  void take_over_if_ready(std::uint32_t group, Instant now);
  // Answers the members that have returned to a group which has no place for them.
  void hear_appeals(Instant now);

 private:
  // -- newcomers
  bool let_vote(ConnectionId id, ControlPeer& connection, const wire::Join& first);

  // -- standing back
  [[nodiscard]] bool give_way();
  void step_down(const std::string& why);

  // -- promises
  [[nodiscard]] std::map<Seat, ConnectionId> gathered(std::uint32_t group,
                                                      const Recovery& recovery) const;
  [[nodiscard]] std::vector<Reporter> reporters(const Recovery& recovery) const;
  [[nodiscard]] std::set<Seat> promised_newcomers() const;
  [[nodiscard]] bool wanted(const Recovery& recovery, const Seat& seat) const;
  void ask_promise(ConnectionId id, ControlPeer& connection, const Recovery& recovery);
  void ask_promises(std::uint32_t group, Recovery& recovery, Instant now);

  // -- the takeover
  void consider(std::uint32_t group, Recovery& recovery, Instant now);
  [[nodiscard]] Instant enough_since(const Base& base,
                                     const std::map<Seat, ConnectionId>& seats) const;
  // `entries`: the log up to the base.
  void take_over(std::uint32_t group, const Base& base, std::vector<wire::LogEntry> entries,
                 Instant now);
  void end_recovery(std::uint32_t group);
  void end_with(std::uint32_t group, const wire::EpochRecord& last);

  // -- appeals: appeals.cpp
  [[nodiscard]] bool foreign(std::uint32_t group, const Seat& seat) const;
  void appeal(ConnectionId id, ControlPeer& connection, const wire::Rejoin& rejoin, Instant now);
  void hear_appeals(std::uint32_t group, Instant now);
  [[nodiscard]] bool outnumbered(std::uint32_t group, const Recovery& appeals) const;

  const Options& options_;
  ServedRun& run_;
  Connections& connections_;
  Outbox& outbox_;
  ServedGroups& served_;
  Returning& returning_;
  Surroundings& around_;
  Instant last_check_{};                  // of the quorums
  std::map<Seat, Allowance> step_downs_;  // for each member that has followed a higher term
  Allowance gives_way_;                   // to members of other epochs
};

}  // namespace pccl::master
