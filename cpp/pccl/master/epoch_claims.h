// Which epoch a master continues from when it takes over a group. Functions of what its peers have
// reported and promised. docs/internals/several-masters.md has the rules and the proof.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "pccl/master/returned.h"
#include "pccl/wire/messages.h"

namespace pccl::master {

// A returned member. `promise`: for the term of the takeover; null: it has not promised yet.
struct Reporter {
  const Returned* report = nullptr;
  const Promised* promise = nullptr;
};

// An epoch that reports claim to be the last decided one, or to come after it.
struct EpochClaim {
  std::uint64_t epoch = 0;
  std::size_t hash = 0;  // of its members
  const std::vector<Seat>* members = nullptr;
  // A reported epoch has the reporter with the newest log, of those that have promised if there are
  // any; of several, the one that was admitted first. A proposal has one that has accepted it; its
  // log ends in the epoch before.
  Reporter best;
  std::size_t supporters = 0;               // reports of it
  const AcceptedEpoch* proposed = nullptr;  // it was accepted after the epoch of `best`; or null
};

// One claim for each epoch that is reported, and one for each that was accepted. They refer to the
// reports and promises.
[[nodiscard]] std::vector<EpochClaim> claims(const std::vector<Reporter>& reporters);
// How many members of the claimed epoch are among `seats`.
[[nodiscard]] std::size_t count_members(const EpochClaim& claim, const std::set<Seat>& seats);

// The state from which a master that takes over continues.
struct Base {
  wire::Rejoin last;                       // the record and the ordinal of the log's end
  std::optional<wire::LogEntry> proposed;  // an epoch that may be decided: it comes next
  ConnectionId source = 0;                 // the member that has the log
};

// Empty: promises are missing. `newcomers`: those that have promised.
[[nodiscard]] std::optional<Base> choose_base(const std::vector<Reporter>& reporters,
                                              const std::set<Seat>& newcomers);

}  // namespace pccl::master
