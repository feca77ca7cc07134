#include "pccl/state/election.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "pccl/state/manifest.h"

namespace pccl::state {
namespace {

constexpr std::size_t kNamesShown = 8;

bool holds(const std::vector<PeerId>& peers, const PeerId& id) {
  return std::find(peers.begin(), peers.end(), id) != peers.end();
}

// The ballots with what follows from the state before.
class Election {
 public:
  Election(const std::vector<Ballot>& ballots, const wire::StateRecord& state)
      : ballots_(ballots), state_(state) {
    for (const Ballot& ballot : ballots_) {
      lost_ = lost_ && !kept(ballot);
      if (ballot.vote.strategy == wire::SyncStrategy::receive_only) continue;
      const wire::SyncVote& vote = ballot.vote;
      named_ = named_ || vote.has_revision;
      if (vote.worked_since != 0) first_work_ = std::min(first_work_, vote.worked_since);
      first_in_ = std::min(first_in_, vote.member_since);
    }
  }

  // Fills `judgement`; the elected ballot, or nothing when that says removals or an error.
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
      judgement.reason =
          lost_ ? "all that had the state (revision " + std::to_string(state_.revision) +
                      ") are gone; resume from a checkpoint's revision, or leave and start anew"
                : "no member offers the state: all that have it only receive";
      return nullptr;
    }
    for (const Ballot& ballot : ballots_) {
      const wire::SyncVote& vote = ballot.vote;
      if (standing(ballot) || vote.strategy == wire::SyncStrategy::receive_only ||
          !vote.has_revision || vote.revision <= *highest) {
        continue;
      }
      judgement.removals.push_back({ballot.peer, Code::revision_mismatch,
                                    "it offers revision " + std::to_string(vote.revision) +
                                        ", but the run is at revision " + std::to_string(*highest) +
                                        "; a newcomer cannot bring a newer state"});
    }
    if (!judgement.removals.empty()) return nullptr;
    // First the form of the state, so that one member with another form is the odd one out.
    const auto form = [](const Ballot& ballot) { return ballot.vote.structure; };
    const auto content = [](const Ballot& ballot) { return ballot.vote.content; };
    std::vector<const Ballot*> able;
    for (const Ballot& ballot : ballots_) {
      if (candidate(ballot) && offer(ballot) == *highest) able.push_back(&ballot);
    }
    const Ballot* elected = most_common(most_common(able, form), content).front();
    judgement.decision.revision = *highest;
    judgement.decision.content = elected->vote.content;
    for (const Ballot& ballot : ballots_) {
      if (receives(ballot, *elected)) {
        if (ballot.vote.strategy == wire::SyncStrategy::send_only) {
          judgement.removals.push_back(
              {ballot.peer, Code::evicted, "it only sends its state, and another one was elected"});
        }
        judgement.decision.receivers.push_back(ballot.peer);
        if (gets_loose(ballot)) judgement.decision.newcomers.push_back(ballot.peer);
      } else if (candidate(ballot) && offer(ballot) == *highest) {
        judgement.decision.holders.push_back(ballot.peer);
      }
    }
    return judgement.removals.empty() ? elected : nullptr;
  }

  // It has a say in what the state is.
  [[nodiscard]] bool standing(const Ballot& ballot) const {
    const wire::SyncVote& vote = ballot.vote;
    if (!state_.exists) {
      // What was trained must not be lost to somebody who came later.
      if (first_work_ != kNever) return vote.worked_since == first_work_;
      return named_ || vote.member_since <= first_in_;
    }
    // A checkpoint may take the place of a state that nobody has any more.
    if (lost_) return vote.has_revision && vote.revision > 0;
    return kept(ballot);
  }

  // It should have had the elected content: it was in the sync before, and does not wait for bytes.
  [[nodiscard]] bool may_diverge(const Ballot& ballot) const {
    return state_.exists && !lost_ && candidate(ballot);
  }

  [[nodiscard]] std::uint64_t offer(const Ballot& ballot) const {
    if (ballot.vote.has_revision) return ballot.vote.revision;
    return state_.exists ? state_.revision + 1 : 0;
  }

 private:
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  // It has the state of the sync before.
  [[nodiscard]] bool kept(const Ballot& ballot) const {
    return ballot.vote.whole && holds(state_.holders, ballot.peer);
  }

  [[nodiscard]] bool candidate(const Ballot& ballot) const {
    return standing(ballot) && ballot.vote.strategy != wire::SyncStrategy::receive_only;
  }

  [[nodiscard]] bool receives(const Ballot& ballot, const Ballot& elected) const {
    if (&ballot == &elected) return false;
    if (ballot.vote.content != elected.vote.content ||
        ballot.vote.structure != elected.vote.structure) {
      return true;
    }
    return gets_loose(ballot) && ballot.vote.loose != elected.vote.loose;
  }

  // Entries that may differ are for those that have none of their own yet.
  [[nodiscard]] bool gets_loose(const Ballot& ballot) const { return !standing(ballot); }

  // Those of `ballots` that say what most of them say; ties: what the longest-standing one says.
  template <class Says>
  static std::vector<const Ballot*> most_common(const std::vector<const Ballot*>& ballots,
                                                const Says& says) {
    std::map<wire::Digest, std::size_t> votes;
    for (const Ballot* ballot : ballots) ++votes[says(*ballot)];
    const Ballot* first = ballots.front();
    for (const Ballot* ballot : ballots) {
      if (votes[says(*ballot)] > votes[says(*first)]) first = ballot;
    }
    std::vector<const Ballot*> same;
    for (const Ballot* ballot : ballots) {
      if (says(*ballot) == says(*first)) same.push_back(ballot);
    }
    return same;
  }

  void check_strategies(Judgement& judgement) const {
    const auto enforces = [](const Ballot& ballot) {
      return ballot.vote.strategy == wire::SyncStrategy::enforce_popular;
    };
    const auto count =
        static_cast<std::size_t>(std::count_if(ballots_.begin(), ballots_.end(), enforces));
    if (count == 0 || count == ballots_.size()) return;
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
          "the state of peer " + ballot.peer.brief() + " cannot be shared: " + ballot.vote.flaw;
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
  bool lost_ = state_.exists;  // none of its holders is here
  // Of those that offer their state, when there was no sync before:
  std::uint64_t first_work_ = kNever;
  std::uint64_t first_in_ = kNever;
  bool named_ = false;  // one of them names a revision
};

std::string difference(const Ballot& odd, const wire::StateEntry* mine, const Ballot& meant,
                       const wire::StateEntry* theirs) {
  const auto has = [](const Ballot& ballot, const wire::StateEntry* entry) {
    return "peer " + ballot.peer.brief() + " has " +
           (entry == nullptr
                ? std::string("none")
                : describe(*entry) + (entry->loose ? ", allowed to differ" : "") +
                      (entry->tie.empty() ? "" : ", the same memory as " + entry->tie));
  };
  const std::string& name = mine != nullptr ? mine->name : theirs->name;
  return "the states differ in " + (name.empty() ? std::string("the array") : name) + ": " +
         has(odd, mine) + ", " + has(meant, theirs);
}

bool same_form(const wire::StateEntry& a, const wire::StateEntry& b) {
  return a.kind == b.kind && a.shape == b.shape && a.loose == b.loose && a.tie == b.tie;
}

// The first difference that matters, as a sentence.
std::optional<std::string> first_difference(const Ballot& ballot, const Ballot& elected,
                                            bool may_lack) {
  auto mine = ballot.entries->begin();
  auto theirs = elected.entries->begin();
  while (mine != ballot.entries->end() || theirs != elected.entries->end()) {
    const bool extra = theirs == elected.entries->end() ||
                       (mine != ballot.entries->end() && mine->name < theirs->name);
    if (extra) return difference(ballot, &*mine, elected, nullptr);
    if (mine == ballot.entries->end() || theirs->name < mine->name) {
      // Made apart, it would no longer be the same memory as the other one.
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
  judgement.decision.holders.clear();  // asked for only once the entries are known
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
    // What is behind the elected revision is replaced anyway: it has no say in the structure.
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

Judgement judge_ends(const std::vector<std::pair<PeerId, wire::SyncEnd>>& ends) {
  Judgement judgement;
  const auto fail = [&](Code code, const PeerId& peer, std::string reason) {
    judgement.removals.clear();
    judgement.code = code;
    judgement.culprit = peer;
    judgement.reason = std::move(reason);
    return judgement;
  };
  const auto present = [&](const PeerId& id) {
    return std::any_of(ends.begin(), ends.end(), [&](const auto& end) { return end.first == id; });
  };
  const wire::SyncEnd* good = nullptr;
  bool others = false;  // somebody has not failed by itself
  for (const auto& [peer, end] : ends) {
    others = others || end.code == Code::ok || end.code == Code::peer_lost;
    if (end.code != Code::ok) continue;
    if (good == nullptr) good = &end;
    if (end.revision != good->revision || end.content != good->content)
      return fail(Code::internal_error, peer, "members ended a sync with different states");
  }
  judgement.decision.step = wire::SyncStep::done;
  if (good != nullptr) {
    judgement.decision.revision = good->revision;
    judgement.decision.content = good->content;
  }
  for (const auto& [peer, end] : ends) {
    if (end.code == Code::ok) continue;
    if (!others || end.code == Code::state_unavailable)
      return fail(end.code, peer, "peer " + peer.brief() + ": " + end.reason);
    if (end.code != Code::peer_lost) {
      judgement.removals.push_back({peer, end.code, end.reason});
    } else if (good != nullptr && std::all_of(end.lost.begin(), end.lost.end(), present)) {
      judgement.removals.push_back(
          {peer, Code::unreachable, "it gets the state from none of its holders: " + end.reason});
    } else {
      judgement.decision.step = wire::SyncStep::again;
    }
  }
  return judgement;
}

}  // namespace pccl::state
