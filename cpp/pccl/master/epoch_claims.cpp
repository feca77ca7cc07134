#include "pccl/master/epoch_claims.h"

#include <algorithm>
#include <map>
#include <utility>

#include "pccl/master/quorum.h"

namespace pccl::master {
namespace {

// The epochs known to a peer that has promised. A newcomer knows none.
struct Known {
  std::uint64_t applied = 0;
  std::uint64_t newest = 0;  // `applied`, or the epoch that it has accepted
};
using Knowledge = std::map<Seat, Known>;

Knowledge knowledge(const std::vector<Reporter>& reporters, const std::set<Seat>& newcomers) {
  Knowledge known;
  for (const auto& [report, promise] : reporters) {
    const std::uint64_t epoch = report->at().first;
    if (promise != nullptr) known[report->seat()] = {epoch, epoch + (promise->accepted ? 1 : 0)};
  }
  for (const Seat& seat : newcomers) known.try_emplace(seat);
  return known;
}

bool same_epoch(const EpochClaim& claim, std::uint64_t epoch, std::size_t hash,
                const std::vector<Seat>& members) {
  return claim.epoch == epoch && claim.hash == hash && *claim.members == members;
}

// An epoch is *closed* if a majority of its members has promised and knows of no later one. Then no
// later one is decided, nor ever will be in an earlier term.
bool closed(const EpochClaim& claim, const Knowledge& known) {
  const auto count = std::ranges::count_if(*claim.members, [&](const Seat& seat) {
    const auto it = known.find(seat);
    return it != known.end() && it->second.newest <= claim.epoch;
  });
  return static_cast<std::size_t>(count) >= majority_of(claim.members->size());
}

// The proposal after this epoch that may be decided. Null: there is none, or it is not closed. No
// other one is decided if a majority of the epoch's members has promised and applied nothing later.
// One without members is closed: nothing follows.
const EpochClaim* proposal_after(const EpochClaim& claim, const std::vector<EpochClaim>& all,
                                 const Knowledge& known) {
  const auto electors = std::ranges::count_if(*claim.members, [&](const Seat& seat) {
    const auto it = known.find(seat);
    return it != known.end() && it->second.applied <= claim.epoch;
  });
  if (static_cast<std::size_t>(electors) < majority_of(claim.members->size())) return nullptr;
  const EpochClaim* newest = nullptr;
  for (const EpochClaim& proposal : all) {
    const bool follows = proposal.proposed != nullptr && proposal.epoch == claim.epoch + 1 &&
                         claim.hash == proposal.best.report->members_hash() &&
                         *claim.members == proposal.best.report->members();
    if (follows && (newest == nullptr || proposal.proposed->term() > newest->proposed->term()))
      newest = &proposal;
  }
  if (newest == nullptr || newest->members->empty()) return newest;
  return closed(*newest, known) ? newest : nullptr;
}

}  // namespace

std::vector<EpochClaim> claims(const std::vector<Reporter>& reporters) {
  std::vector<EpochClaim> all;
  std::map<const void*, std::size_t> of_record;
  const auto less = [](const Reporter& a, const Reporter& b) {
    const auto rank = [](const Reporter& one) {
      return std::pair(one.promise != nullptr, one.report->at());
    };
    return rank(a) < rank(b) || (rank(a) == rank(b) && a.report->place() > b.report->place());
  };
  for (const Reporter& one : reporters) {
    const Returned& report = *one.report;
    const auto [known, fresh] = of_record.try_emplace(report.record(), all.size());
    if (fresh) {
      const std::uint64_t epoch = report.at().first;
      // Records of one epoch may differ in what came after it.
      const auto same = std::ranges::find_if(all, [&](const EpochClaim& claim) {
        return same_epoch(claim, epoch, report.members_hash(), report.members());
      });
      known->second = static_cast<std::size_t>(same - all.begin());
      if (same == all.end())
        all.push_back({epoch, report.members_hash(), &report.members(), one, 0, nullptr});
    }
    EpochClaim& claim = all[known->second];
    ++claim.supporters;
    if (less(claim.best, one)) claim.best = one;
  }
  std::set<const void*> seen;
  for (const Reporter& one : reporters) {
    if (one.promise == nullptr || !one.promise->accepted) continue;
    const AcceptedEpoch& accepted = *one.promise->accepted;
    if (!seen.insert(&accepted).second) continue;
    all.push_back(
        {accepted.epoch(), accepted.members_hash(), &accepted.members(), one, 0, &accepted});
  }
  return all;
}

std::size_t count_members(const EpochClaim& claim, const std::set<Seat>& seats) {
  const auto is_there = [&](const Seat& seat) { return seats.contains(seat); };
  return static_cast<std::size_t>(std::ranges::count_if(*claim.members, is_there));
}

// If all reports are true there is exactly one closed epoch that a member has applied; or none, and
// one proposal that may be decided. A false epoch needs more supporters than the true one.
std::optional<Base> choose_base(const std::vector<Reporter>& reporters,
                                const std::set<Seat>& newcomers) {
  const Knowledge known = knowledge(reporters, newcomers);
  const std::vector<EpochClaim> all = claims(reporters);
  const auto better = [](const EpochClaim& claim, const EpochClaim* than) {
    return than == nullptr ||
           std::pair(claim.supporters, claim.epoch) > std::pair(than->supporters, than->epoch);
  };
  const EpochClaim* last = nullptr;    // closed
  const EpochClaim* before = nullptr;  // the epoch before `next`
  const EpochClaim* next = nullptr;
  for (const EpochClaim& claim : all) {
    if (claim.proposed != nullptr) continue;
    if (better(claim, last) && closed(claim, known) && known.contains(claim.best.report->seat()))
      last = &claim;
    if (!better(claim, before)) continue;
    if (const EpochClaim* const proposal = proposal_after(claim, all, known)) {
      before = &claim;
      next = proposal;
    }
  }
  // Both: `last` is one of the two epochs on the other side, or one of the sides is false.
  const bool same = next != nullptr && last != nullptr &&
                    same_epoch(*last, next->epoch, next->hash, *next->members);
  if (last != nullptr &&
      (next == nullptr || same || last == before || last->supporters >= before->supporters))
    return Base{last->best.report->rejoin(), std::nullopt, last->best.report->connection()};
  if (next == nullptr) return std::nullopt;
  return Base{next->best.report->rejoin(), next->proposed->entry(),
              next->best.report->connection()};
}

}  // namespace pccl::master
