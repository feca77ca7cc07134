// Whose state counts: what a sync decides from what its members say. Pure functions that also say
// why.
#pragma once

#include <string>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/wire/records.h"

namespace pccl::state {

// What one member of the sync says, in rank order.
struct Ballot {
  PeerId peer;
  wire::SyncVote vote;
  const std::vector<wire::StateEntry>* entries = nullptr;  // only in judge_details
};

// A member that cannot stay, and the sentence for it.
struct Removal {
  PeerId peer;
  Code code = Code::evicted;
  std::string reason;
};

struct Judgement {
  std::vector<Removal> removals;  // not empty: nothing is decided; ask again without them
  Code code = Code::ok;           // else the sync fails for all
  PeerId culprit;
  std::string reason;
  wire::SyncDecision decision;
};

// The rules, in their order:
// - If some enforce the popular state and some do not, those that do not are removed.
// - A state that cannot be shared ends the sync for all where a standing member has it; any other
//   member that has one is removed.
// - Standing members are those that took part in the sync before, and took its state over. If they
//   are all gone, those that bring a checkpoint's revision are; without one the state is lost.
// - In a run's first sync they are the oldest of those that offer their state: that did the run's
//   first operation; if there was none, all when one of them names a revision, else those that were
//   let in first.
// - A newcomer that names a revision ahead of the standing members' is removed, unless it only
//   receives.
// - The highest revision that a standing member offers counts; among those that offer it the form
//   that most states have, then the content that most have, then the longest-standing one's. A
//   newcomer never wins, and members that only receive offer nothing.
// - One that only sends and would have to receive is removed.
// The revision after a sync is the elected one. Where the library counts, members offer the
// revision after the last.

// From the hashes alone: `done` when all are in step, else `detail`.
[[nodiscard]] Judgement judge_votes(const std::vector<Ballot>& ballots,
                                    const wire::StateRecord& state);

// With all entries: structures must agree with the elected one's. A standing member that differs
// ends the sync for all; any other one is removed, except that at level 2 it may lack entries.
// REQUIRES: ballots have entries.
[[nodiscard]] Judgement judge_details(const std::vector<Ballot>& ballots,
                                      const wire::StateRecord& state);

// How the transfer ended for each member: `done`, or `again` when a receiver's source is gone.
// A receiver that fails by itself is removed, so is one that none of its sources could serve though
// all of them are here; the sync fails for all where nobody else came through.
// REQUIRES: ends is not empty.
[[nodiscard]] Judgement judge_ends(const std::vector<std::pair<PeerId, wire::SyncEnd>>& ends);

}  // namespace pccl::state
