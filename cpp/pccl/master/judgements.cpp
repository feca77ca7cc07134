#include "pccl/master/judgements.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace pccl::master {

std::optional<Mismatch> judge_mismatch(const std::string& call, const std::vector<Claim>& claims,
                                       std::size_t members, bool waited_enough, const Naming& who) {
  std::map<std::uint64_t, std::size_t> votes;
  for (const Claim& claim : claims) ++votes[claim.signature.hash];
  if (votes.size() < 2) return std::nullopt;
  const Claim* meant = &claims.front();
  for (const Claim& claim : claims) {
    if (votes[claim.signature.hash] > votes[meant->signature.hash]) meant = &claim;
  }
  const bool majority = votes[meant->signature.hash] * 2 > members;
  if (claims.size() < members && !majority && !waited_enough) return std::nullopt;
  const auto odd = std::ranges::find_if(
      claims, [&](const Claim& claim) { return claim.signature.hash != meant->signature.hash; });
  return Mismatch{odd->peer, "members disagree on " + call + ": " + who(odd->peer) +
                                 " called it with (" + odd->signature.text + "), " +
                                 who(meant->peer) + " with (" + meant->signature.text + ")"};
}

std::optional<PeerId> judge_links(const std::vector<PeerId>& members,
                                  const std::vector<BadLink>& reports) {
  std::set<std::pair<PeerId, PeerId>> pairs;
  for (const BadLink& report : reports) {
    pairs.insert(std::minmax(report.reporter, report.about));
  }
  std::map<PeerId, std::size_t> count;
  for (const auto& [a, b] : pairs) {
    ++count[a];
    ++count[b];
  }
  std::optional<PeerId> worst;
  for (const PeerId& member : members) {
    if (count[member] > 0 && (!worst || count[member] >= count[*worst])) worst = member;
  }
  return worst;
}

std::string describe_waiting(const std::vector<Waiting>& members, const std::string& between,
                             const Naming& who,
                             const std::function<std::string(const wire::CallKey&)>& name) {
  std::string text;
  for (std::size_t rank = 0; rank < members.size(); ++rank) {
    if (rank > 0) text += between;
    text += who(members[rank].peer) + " waits in ";
    const auto& waits = members[rank].blocked.waits;
    for (std::size_t i = 0; i < waits.size() && i < 4; ++i) {
      if (i > 0) text += ", ";
      text += name(waits[i]);
    }
    if (waits.size() > 4) text += " and " + std::to_string(waits.size() - 4) + " more";
  }
  return text;
}

}  // namespace pccl::master
