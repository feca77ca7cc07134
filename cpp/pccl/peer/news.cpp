#include "pccl/peer/news.h"

#include <algorithm>

#include "pccl/base/text.h"

namespace pccl::peer {
namespace {

constexpr std::size_t kNamed = 4;  // joined peers named in one line

}  // namespace

void MembershipNews::note(const wire::EpochRecord& record) {
  const std::string now_are = plural(record.members.size(), "member");
  std::vector<PeerId> members;
  std::vector<std::string> came;
  for (std::size_t rank = 0; rank < record.members.size(); ++rank) {
    const PeerId& peer = record.members[rank].id;
    members.push_back(peer);
    if (std::ranges::find(members_, peer) == members_.end())
      came.push_back("rank " + std::to_string(rank) + " (" +
                     wire::shown_name(record.members, peer) + ")");
  }
  if (!members_.empty() && !came.empty()) {
    joined_ += came.size();
    std::string names;
    for (std::size_t i = 0; i < came.size() && i < kNamed; ++i) names += (i ? ", " : "") + came[i];
    if (came.size() > kNamed) names += " and " + std::to_string(came.size() - kNamed) + " more";
    lines_.push_back(plural(came.size(), "peer") + " joined: " + names + "; " + now_are + " now");
  }
  for (const wire::Departure& gone : record.departures) {
    const auto found = std::ranges::find(members_, gone.id);
    if (found == members_.end()) continue;
    ++lost_;
    departures_.push_back(gone);
    if (departures_.size() > kRemembered) departures_.pop_front();
    lines_.push_back("lost rank " + std::to_string(found - members_.begin()) + " (" + gone.name +
                     "): " + gone.reason + "; " + now_are +
                     (record.members.size() == 1 ? " goes on" : " go on"));
  }
  members_ = std::move(members);
}

}  // namespace pccl::peer
