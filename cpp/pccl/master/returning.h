// Members that return to a master: to a group that it serves, or to wait until it is clear what
// becomes of their group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "pccl/master/connections.h"
#include "pccl/master/returned.h"
#include "pccl/master/served_groups.h"

namespace pccl::master {

// The members of one group that have returned, and wait for each other.
struct Recovery {
  Instant since{};                    // when the first of them came
  std::vector<Returned> reports;      // one for each member
  std::map<Seat, Instant> asked;      // since when a member was asked for its log, and owes it
  std::optional<Instant> prefix_due;  // when earlier entries of another log are not waited for
  std::uint32_t term = 0;             // several masters: promises were asked for it; 0: none were
  Instant promises_since{};           // several masters: when promises were asked
  bool changed = true;                // several masters: since a takeover was last considered
  bool waited = false;                // several masters: the grace period was over then
  // Several masters: when to consider a takeover again. Members of the base may still come.
  std::optional<Instant> again;
};

// A member of the run that this address served before the master was restarted. Newcomers have
// begun another run here meanwhile.
struct Former {
  Returned report;
  wire::Envelope envelope;
};

// How many members of the last epoch have returned, and how many it has. REQUIRES: reports is not
// empty.
[[nodiscard]] std::pair<std::size_t, std::size_t> count_back(const std::vector<Returned>& reports);

// *one thread: the master's*
class Returning {
 public:
  Returning(const Options& options, ServedRun& run, Connections& connections, Outbox& outbox,
            ServedGroups& served)
      : options_(options), run_(run), connections_(connections), outbox_(outbox), served_(served) {}

  // -- reports
  // Whether there is room for one more report. It then shares the record of an equal one. False:
  // its connection was closed, and the member will try again.
  [[nodiscard]] bool admit(Returned& more);
  // Replaces an earlier report of the member.
  void add(Recovery& recovery, const Returned& report);
  // The connection is gone, or is of no use any more.
  void forget(ConnectionId id);
  // This master may begin a run again, if it serves none and no members of one are here.
  void forget_run();
  [[nodiscard]] bool too_many_bytes(std::size_t more) const;
  void close_for_lack_of_room(ConnectionId id);

  // -- logs
  // A member returns to a group that this master serves. `log`: its answer to RequestLog, or null.
  void return_to(ConnectionId id, ControlPeer& connection, const wire::Rejoin& rejoin,
                 const std::vector<wire::LogEntry>* log, Instant now);
  // A member has one deadline for its log, however often it returns: the others wait for it.
  void ask_for_log(ConnectionId id, ControlPeer& connection, const wire::Rejoin& rejoin,
                   Instant now);
  // The log that ends with `last`, which `source` has reported. A log begins with its member's
  // admission at the earliest. If a member that has returned lacks entries before that, they come
  // from others. Empty: a log has not arrived; it has been asked for.
  [[nodiscard]] std::optional<std::vector<wire::LogEntry>> whole_log(ConnectionId source,
                                                                     const wire::Rejoin& last,
                                                                     Recovery& recovery,
                                                                     Instant now);
  // REQUIRES: the log was asked for. True: the recovery of its group may be ready now.
  [[nodiscard]] bool on_log_part(ConnectionId id, ControlPeer& connection,
                                 const wire::LogPart& part, Instant now);

  std::map<std::uint32_t, Recovery> recoveries;  // by group: this master does not serve it
  std::map<std::uint32_t, Recovery> appeals;     // by group: this master serves it without them
  std::map<ConnectionId, Former> formers;        // of another run than the one that began here

 private:
  [[nodiscard]] std::size_t reported_bytes(const Seat& without) const;
  [[nodiscard]] bool has_log(ConnectionId id, const wire::Rejoin& rejoin, Instant now);
  [[nodiscard]] const Returned* provider(const Recovery& recovery,
                                         const wire::EpochRecord& admission, std::uint64_t ordinal,
                                         std::uint64_t last_epoch) const;

  const Options& options_;
  ServedRun& run_;
  Connections& connections_;
  Outbox& outbox_;
  ServedGroups& served_;
};

}  // namespace pccl::master
