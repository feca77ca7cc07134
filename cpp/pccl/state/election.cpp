#include "pccl/state/election.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "pccl/state/manifest.h"

namespace pccl::state {
namespace {

constexpr std::size_t kNamesShown = 8;

// Judges the ballots, given the state of the previous sync.
class Election {
 public:
  Election(const std::vector<Ballot>& ballots, const wire::StateRecord& state)
      : ballots_(ballots), state_(state) {
    for (const Ballot& ballot : ballots_) {
      lost_ = lost_ && !kept(ballot);
      if (ballot.vote.strategy == wire::SyncStrategy::receive_only) continue;
      const wire::SyncVote& vote = ballot.vote;
      named_ = named_ || (vote.has_revision && !vote.mixed);
      if (vote.worked_since != 0) first_work_ = std::min(first_work_, vote.worked_since);
      first_in_ = std::min(first_in_, vote.member_since);
    }
  }

  // Fills `judgement`. Returns the elected ballot; null: `judgement` has removals or an error.
  const Ballot* elect(Judgement& judgement) {
    check_strategies(judgement);
    if (!judgement.removals.empty()) return nullptr;
    check_flaws(judgement);
    if (!judgement.removals.empty() || judgement.code != Code::ok) return nullptr;
    std::optional<std::uint64_t> highest;
    for (const Ballot& ballot : ballots_) {
      if (candidate(ballot) && (!highest || offer(ballot) > *highest)) highest = offer(ballot);
    }
    if (!highest) {
      judgement.code = Code::state_unavailable;
      judgement.reason = why_none();
      return nullptr;
    }
    for (const Ballot& ballot : ballots_) {
      const wire::SyncVote& vote = ballot.vote;
      if (standing(ballot) || !offers(ballot) || !vote.has_revision || vote.revision <= *highest) {
        continue;
      }
      judgement.removals.push_back({ballot.peer, Code::revision_mismatch,
                                    "it offers revision " + std::to_string(vote.revision) +
                                        ", but the run is at revision " + std::to_string(*highest) +
                                        "; a newcomer cannot bring a newer state"});
    }
    if (!judgement.removals.empty()) return nullptr;
    // The structure first, so that a single member with another structure is the odd one out.
    const auto structure = [](const Ballot& ballot) { return ballot.vote.structure; };
    const auto content = [](const Ballot& ballot) { return ballot.vote.content; };
    std::vector<const Ballot*> able;
    for (const Ballot& ballot : ballots_) {
      if (candidate(ballot) && offer(ballot) == *highest) able.push_back(&ballot);
    }
    const Ballot* elected = most_common(most_common(able, structure), content).front();
    judgement.decision.revision = *highest;
    judgement.decision.content = elected->vote.content;
    for (const Ballot& ballot : ballots_) {
      if (receives(ballot, *elected)) {
        if (ballot.vote.strategy == wire::SyncStrategy::send_only) {
          judgement.removals.push_back(
              {ballot.peer, Code::evicted, "it only sends its state, but another one was elected"});
        }
        judgement.decision.receivers.push_back(ballot.peer);
        if (gets_loose(ballot)) judgement.decision.newcomers.push_back(ballot.peer);
      } else if (candidate(ballot) && offer(ballot) == *highest) {
        judgement.decision.holders.push_back(ballot.peer);
      }
    }
    return judgement.removals.empty() ? elected : nullptr;
  }

  // Whether the member is a standing one: see election.h.
  [[nodiscard]] bool standing(const Ballot& ballot) const {
    const wire::SyncVote& vote = ballot.vote;
    if (!state_.exists) {
      // A member that joined later must not replace trained state.
      if (first_work_ != kNever) return vote.worked_since == first_work_;
      return named_ || vote.member_since <= first_in_;
    }
    // A checkpoint may replace a state that no member has any more.
    if (lost_) return vote.has_revision && vote.revision > 0;
    return kept(ballot);
  }

  // Whether the member should have the elected content: it completed the previous sync.
  [[nodiscard]] bool may_diverge(const Ballot& ballot) const {
    return state_.exists && !lost_ && candidate(ballot);
  }

  [[nodiscard]] std::uint64_t offer(const Ballot& ballot) const {
    if (ballot.vote.has_revision) return ballot.vote.revision;
    return state_.exists ? state_.revision + 1 : 0;
  }

 private:
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  // Whether the member has the state of the previous sync.
  [[nodiscard]] bool kept(const Ballot& ballot) const {
    return ballot.vote.whole && !ballot.vote.mixed &&
           std::ranges::count(state_.holders, ballot.peer) > 0;
  }

  [[nodiscard]] static bool offers(const Ballot& ballot) {
    return !ballot.vote.mixed && ballot.vote.strategy != wire::SyncStrategy::receive_only;
  }

  [[nodiscard]] bool candidate(const Ballot& ballot) const {
    return standing(ballot) && offers(ballot);
  }

  [[nodiscard]] bool receives(const Ballot& ballot, const Ballot& elected) const {
    if (&ballot == &elected) return false;
    if (ballot.vote.content != elected.vote.content ||
        ballot.vote.structure != elected.vote.structure) {
      return true;
    }
    return gets_loose(ballot) && ballot.vote.loose != elected.vote.loose;
  }

  // Why no member is a candidate.
  [[nodiscard]] std::string why_none() const {
    std::string parts;
    for (const Ballot& ballot : ballots_)
      if (ballot.vote.mixed) parts += (parts.empty() ? "" : ", ") + ballot.name;
    const bool mixed = !parts.empty();
    if (mixed) parts = "; parts only are at " + parts;
    if (lost_) {
      return "all members that had the state (revision " + std::to_string(state_.revision) +
             ") are gone" + parts +
             "; resume from a checkpoint's revision, or leave and start anew";
    }
    if (mixed) return "no member offers the state" + parts;
    return "no member offers the state: all members that have it only receive";
  }

  // Only members without loose entries of their own receive them.
  [[nodiscard]] bool gets_loose(const Ballot& ballot) const {
    return !standing(ballot) || ballot.vote.mixed;
  }

  // The ballots with the most common value of `hash`; ties: the longest-standing member's value.
  template <class Hash>
  static std::vector<const Ballot*> most_common(std::vector<const Ballot*> ballots,
                                                const Hash& hash) {
    std::map<wire::Digest, std::size_t> votes;
    for (const Ballot* ballot : ballots) ++votes[hash(*ballot)];
    const wire::Digest most = hash(**std::ranges::max_element(
        ballots, {}, [&](const Ballot* ballot) { return votes[hash(*ballot)]; }));
    std::erase_if(ballots, [&](const Ballot* ballot) { return hash(*ballot) != most; });
    return ballots;
  }

  void check_strategies(Judgement& judgement) const {
    const auto enforces = [](const Ballot& ballot) {
      return ballot.vote.strategy == wire::SyncStrategy::enforce_popular;
    };
    if (std::ranges::none_of(ballots_, enforces)) return;
    for (const Ballot& ballot : ballots_) {
      if (enforces(ballot)) continue;
      judgement.removals.push_back(
          {ballot.peer, Code::evicted,
           "it called sync with SEND_ONLY or RECEIVE_ONLY while others use ENFORCE_POPULAR"});
    }
  }

  void check_flaws(Judgement& judgement) const {
    for (const Ballot& ballot : ballots_) {
      if (ballot.vote.flaw.empty()) continue;
      std::string reason =
          "the state of peer " + ballot.name + " cannot be shared: " + ballot.vote.flaw;
      if (standing(ballot)) {
        judgement.removals.clear();
        judgement.code = Code::invalid_argument;
        judgement.culprit = ballot.peer;
        judgement.reason = std::move(reason);
        return;
      }
      judgement.removals.push_back({ballot.peer, Code::invalid_argument, std::move(reason)});
    }
  }

  const std::vector<Ballot>& ballots_;
  const wire::StateRecord& state_;
  bool lost_ = state_.exists;  // no holder is present
  // Among the members that do not only receive. Fresh weights must not replace trained ones, also
  // if only parts of these are left.
  std::uint64_t first_work_ = kNever;
  std::uint64_t first_in_ = kNever;
  bool named_ = false;  // one names a revision
};

std::string difference(const Ballot& odd, const wire::StateEntry* mine, const Ballot& meant,
                       const wire::StateEntry* theirs) {
  const auto has = [](const Ballot& ballot, const wire::StateEntry* entry) {
    return "peer " + ballot.name + " has " +
           (entry == nullptr
                ? std::string("none")
                : describe(*entry) + (entry->loose ? ", allowed to differ" : "") +
                      (entry->tie.empty() ? "" : ", the same memory as " + entry->tie));
  };
  const std::string& name = mine != nullptr ? mine->name : theirs->name;
  return "the states differ in " + (name.empty() ? std::string("the array") : name) + ": " +
         has(odd, mine) + ", " + has(meant, theirs);
}

// Describes the first difference in structure. `may_lack`: missing entries are no difference.
std::optional<std::string> first_difference(const Ballot& ballot, const Ballot& elected,
                                            bool may_lack) {
  auto mine = ballot.entries->begin();
  auto theirs = elected.entries->begin();
  while (mine != ballot.entries->end() || theirs != elected.entries->end()) {
    const bool extra = theirs == elected.entries->end() ||
                       (mine != ballot.entries->end() && mine->name < theirs->name);
    if (extra) return difference(ballot, &*mine, elected, nullptr);
    if (mine == ballot.entries->end() || theirs->name < mine->name) {
      // A tied entry cannot be created: it would not share the other entry's memory.
      if (!may_lack || !theirs->tie.empty()) return difference(ballot, nullptr, elected, &*theirs);
      ++theirs;
      continue;
    }
    if (!same_form(*mine, *theirs)) return difference(ballot, &*mine, elected, &*theirs);
    ++mine;
    ++theirs;
  }
  return std::nullopt;
}

wire::Divergence divergence(const Ballot& ballot, const Ballot& elected) {
  wire::Divergence found{ballot.peer, {}};
  auto theirs = elected.entries->begin();
  for (const wire::StateEntry& mine : *ballot.entries) {
    while (theirs != elected.entries->end() && theirs->name < mine.name) ++theirs;
    if (theirs == elected.entries->end() || theirs->name != mine.name) continue;
    if (mine.loose || mine.content == theirs->content) continue;
    if (found.names.size() == kNamesShown) {
      found.names.emplace_back("...");
      break;
    }
    found.names.push_back(mine.name);
  }
  return found;
}

}  // namespace

Judgement judge_votes(const std::vector<Ballot>& ballots, const wire::StateRecord& state) {
  Judgement judgement;
  Election election(ballots, state);
  if (election.elect(judgement) == nullptr) return judgement;
  const bool in_step = judgement.decision.receivers.empty();
  judgement.decision.step = in_step ? wire::SyncStep::done : wire::SyncStep::detail;
  judgement.decision.holders.clear();  // these are decided once the entries are known
  judgement.decision.receivers.clear();
  judgement.decision.newcomers.clear();
  return judgement;
}

Judgement judge_details(const std::vector<Ballot>& ballots, const wire::StateRecord& state) {
  Judgement judgement;
  Election election(ballots, state);
  const Ballot* elected = election.elect(judgement);
  if (elected == nullptr) return judgement;
  for (const Ballot& ballot : ballots) {
    // A state behind the elected revision is replaced anyway, so its structure does not count.
    const bool standing =
        election.standing(ballot) && election.offer(ballot) == judgement.decision.revision;
    const auto odd = first_difference(ballot, *elected, ballot.vote.owned && !standing);
    if (!odd) {
      if (standing && election.may_diverge(ballot) && ballot.vote.content != elected->vote.content)
        judgement.decision.diverged.push_back(divergence(ballot, *elected));
      continue;
    }
    if (standing) {
      judgement.removals.clear();
      judgement.code = Code::mismatched_call;
      judgement.culprit = ballot.peer;
      judgement.reason = *odd;
      return judgement;
    }
    judgement.removals.push_back({ballot.peer, Code::mismatched_call, *odd});
  }
  judgement.decision.step = wire::SyncStep::transfer;
  return judgement;
}

Judgement judge_ends(const std::vector<End>& ends) {
  Judgement judgement;
  const auto fail = [&](Code code, const PeerId& peer, std::string reason) {
    judgement.removals.clear();
    judgement.code = code;
    judgement.culprit = peer;
    judgement.reason = std::move(reason);
    return judgement;
  };
  const auto present = [&](const PeerId& id) {
    return std::ranges::any_of(ends, [&](const End& end) { return end.peer == id; });
  };
  const wire::SyncEnd* good = nullptr;
  bool others = false;  // some member has not failed by itself
  for (const auto& [peer, name, end] : ends) {
    others = others || end.code == Code::ok || end.code == Code::peer_lost;
    if (end.code != Code::ok) continue;
    if (good == nullptr) good = &end;
    if (end.revision != good->revision || end.content != good->content)
      return fail(Code::internal_error, peer,
                  "peer " + name + " ended a sync with another state than others");
  }
  judgement.decision.step = wire::SyncStep::done;
  if (good != nullptr) {
    judgement.decision.revision = good->revision;
    judgement.decision.content = good->content;
  }
  for (const auto& [peer, name, end] : ends) {
    if (end.code == Code::ok) continue;
    if (!others || end.code == Code::state_unavailable)
      return fail(end.code, peer, "peer " + name + ": " + end.reason);
    if (end.code != Code::peer_lost) {
      judgement.removals.push_back({peer, end.code, end.reason});
    } else if (good != nullptr && std::ranges::all_of(end.lost, present)) {
      judgement.removals.push_back(
          {peer, Code::unreachable,
           "it cannot get the state from any of its holders: " + end.reason});
    } else {
      judgement.decision.step = wire::SyncStep::again;
    }
  }
  return judgement;
}

}  // namespace pccl::state
