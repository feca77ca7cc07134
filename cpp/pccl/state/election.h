// Elects the shared state of a sync from its members' reports. Pure functions that also give the
// reason.
#pragma once

#include <string>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/wire/records.h"

namespace pccl::state {

// One member's report. Ballots are in rank order.
struct Ballot {
  PeerId peer;
  std::string name;  // wire::shown_name
  wire::SyncVote vote;
  const std::vector<wire::StateEntry>* entries = nullptr;  // only in judge_details
};

// How one member's part in the transfer ended.
struct End {
  PeerId peer;
  std::string name;  // wire::shown_name
  wire::SyncEnd end;
};

// A member that is removed, and why.
struct Removal {
  PeerId peer;
  Code code = Code::evicted;
  std::string reason;
};

struct Judgement {
  // Not empty: nothing is decided; judge again without these members.
  std::vector<Removal> removals;
  Code code = Code::ok;  // other codes: the sync fails for all
  PeerId culprit;
  std::string reason;
  wire::SyncDecision decision;
};

// The rules, in their order:
// - If some members enforce the popular state and others do not, the others are removed.
// - If a standing member's state cannot be shared, the sync fails for all. Any other member whose
//   state cannot be shared is removed.
// - The standing members are those that completed the previous sync. If all of them are gone, the
//   members that bring a checkpoint's revision take their place; if there is none, the state is
//   lost.
// - In a run's first sync, the standing members are the oldest of those that offer their state: the
//   ones that took part in the run's first operation; if there was none, all of them if one names a
//   revision, otherwise the ones that were admitted first.
// - A newcomer that names a higher revision than the standing members is removed, unless it only
//   receives.
// - The highest revision offered by a standing member is elected. Among those that offer it, the
//   most common structure is elected, then the most common content, then the longest-standing
//   member's. A newcomer never wins. Members that only receive, or have parts of a state,
//   offer nothing.
// - A member that only sends and would have to receive is removed.
// The elected revision is the revision after the sync. Where the library counts revisions, members
// offer the one after the last.

// Judges the hashes alone: `done` when all members agree, otherwise `detail`.
[[nodiscard]] Judgement judge_votes(const std::vector<Ballot>& ballots,
                                    const wire::StateRecord& state);

// Judges the entries: structures must equal the elected one. If a standing member differs, the sync
// fails for all; any other member that differs is removed, but in the simple API it may lack
// entries. REQUIRES: ballots have entries.
[[nodiscard]] Judgement judge_details(const std::vector<Ballot>& ballots,
                                      const wire::StateRecord& state);

// Judges how the transfer ended for each member: `done`, or `again` when a receiver's source is
// gone. Removes receivers that failed by themselves, and receivers that no source could serve
// although all sources are present. If no other member succeeded, the sync fails for all. REQUIRES:
// ends is not empty.
[[nodiscard]] Judgement judge_ends(const std::vector<End>& ends);

}  // namespace pccl::state
