#include "pccl/master/replicas.h"

#include <algorithm>
#include <utility>

namespace pccl::master {
namespace {

constexpr std::size_t kMaxName = 256;
constexpr std::uint32_t kMaxRanks = 4096;

std::string of_rank(std::size_t rank, const std::string& reason) {
  return "rank " + std::to_string(rank) + ": " + reason;
}

}  // namespace

// -- the present replicas

std::string Replicas::objection(const wire::Join& join) const {
  const auto it = groups_.find(join.group);
  const bool occupied = it != groups_.end() && !it->second->empty();
  const std::uint32_t here = occupied ? it->second->ranks_per_replica() : 0;
  if (join.replica.empty() && join.ranks_per_replica == 0) {
    if (here == 0 && join.group >= ranks()) return {};
    return "the peers of group " + std::to_string(join.group) +
           " are ranks of replicas, and this one names none";
  }
  if (join.replica.empty() || join.replica.size() > kMaxName || join.ranks_per_replica == 0 ||
      join.ranks_per_replica > kMaxRanks || join.group >= join.ranks_per_replica) {
    return "a replica has a name of up to 256 bytes, and one peer in each of the groups 0 to "
           "n - 1, where n is its number of ranks";
  }
  if (occupied && here == 0)
    return "the peers of group " + std::to_string(join.group) + " belong to no replicas";
  const std::uint32_t usual = ranks();
  if (usual != 0 && usual != join.ranks_per_replica) {
    return "the replicas of this run have " + std::to_string(usual) + " ranks, and not " +
           std::to_string(join.ranks_per_replica);
  }
  return {};
}

std::string Replicas::objection(const wire::Rejoin& rejoin) const {
  const wire::EpochRecord& record = rejoin.record;
  const std::uint32_t ranks = record.ranks_per_replica;
  const auto fits = [&](const wire::Member& member) {
    return ranks == 0 ? member.replica.empty()
                      : !member.replica.empty() && member.replica.size() <= kMaxName;
  };
  if ((ranks != 0 && (ranks > kMaxRanks || rejoin.group >= ranks)) ||
      !std::ranges::all_of(record.members, fits))
    return "its group has impossible replicas";
  // The run has groups without replicas.
  const bool others =
      ranks != 0 && std::ranges::any_of(groups_, [&](const auto& item) {
        return item.first < ranks && !item.second->empty() && item.second->ranks_per_replica() == 0;
      });
  if (others) return "the run went on without this peer";
  const std::uint32_t usual = this->ranks();
  // A member with another number of ranks, or with no replica in a group of ranks, belongs to
  // another run.
  const bool differs = ranks != usual && (ranks != 0 || rejoin.group < usual);
  if (usual != 0 && (differs || (ranks != 0 && !recovering())))
    return "the run went on without this peer";
  return {};
}

std::uint32_t Replicas::ranks() const {
  if (recovering()) return recovering_ranks_;
  for (const auto& [id, group] : groups_) {
    if (group->ranks_per_replica() != 0) return group->ranks_per_replica();
  }
  return 0;
}

std::size_t Replicas::Standings::count(const std::vector<char>& which) const {
  return static_cast<std::size_t>(std::ranges::count(which, 1));
}

Replicas::Table Replicas::table() const {
  Table table;
  const std::uint32_t ranks = this->ranks();
  for (const auto& [id, group] : groups_) {
    if (id >= ranks) break;
    for (const RankStanding& rank : group->ranks()) {
      Standings& replica = table[rank.peer.replica];
      for (auto* list : {&replica.member, &replica.waiting, &replica.ready}) list->resize(ranks);
      replica.members.resize(ranks);
      replica.joined = std::min(replica.joined, rank.peer.joined);
      if (rank.member) replica.members[id] = rank.peer.id;
      replica.member[id] |= rank.member ? 1 : 0;
      replica.waiting[id] |= rank.waiting ? 1 : 0;
      replica.ready[id] |= rank.ready ? 1 : 0;
    }
  }
  return table;
}

template <class Fits>
std::vector<std::string> Replicas::pick(const Table& table, const Fits& fits) {
  std::vector<std::pair<std::uint64_t, std::string>> found;
  for (const auto& [name, replica] : table) {
    if (fits(name, replica)) found.emplace_back(replica.joined, name);
  }
  std::ranges::sort(found);
  std::vector<std::string> names;
  for (auto& [joined, name] : found) names.push_back(std::move(name));
  return names;
}

// The replicas that can be admitted now. A replica waits while members of an earlier one have its
// name.
std::vector<std::string> Replicas::ready() const {
  if (admission_paused_) return {};
  return pick(table(), [&](const std::string& name, const Standings& replica) {
    return replica.all(replica.ready) && replica.count(replica.member) == 0 &&
           !entering_.contains(name);
  });
}

bool Replicas::started() const {
  const std::uint32_t ranks = this->ranks();
  return std::ranges::any_of(groups_, [&](const auto& item) {
    return item.first < ranks && item.second->ranks_per_replica() != 0 &&
           !item.second->record().members.empty();
  });
}

std::vector<std::string> Replicas::founders(std::uint32_t& wanted) const {
  wanted = options_.min_peers;
  const std::uint32_t ranks = this->ranks();
  for (const auto& [id, group] : groups_) {
    if (id >= ranks) break;
    for (const RankStanding& rank : group->ranks()) {
      if (rank.waiting) wanted = std::max(wanted, rank.min_peers);
    }
  }
  return pick(table(), [](const std::string&, const Standings& replica) {
    return replica.all(replica.waiting);
  });
}

std::uint32_t Replicas::missing() const {
  std::uint32_t wanted = 0;
  const auto present = static_cast<std::uint32_t>(founders(wanted).size());
  return wanted > present ? wanted - present : 0;
}

// -- admission points

std::optional<std::vector<std::string>> Replicas::to_admit(std::uint32_t group,
                                                           std::uint64_t point) {
  const auto own = groups_.find(group);
  if (recovering() || !lost_.empty() || own == groups_.end()) return std::nullopt;
  const std::vector<RankStanding> ranks = own->second->ranks();
  for (const RankStanding& rank : ranks) {
    // This rank continues although another rank of its replica has finished.
    if (!rank.member || !finishing_.contains(rank.peer.replica)) continue;
    lost_[rank.peer.replica] = {"another one left, and this one goes on", true};
    dirty_ = true;
  }
  if (!lost_.empty()) return std::nullopt;
  if (point > last_point_) {
    last_point_ = point;
    std::vector<std::string> names = ready();
    entering_.insert(names.begin(), names.end());
    if (!names.empty()) admitted_[point] = std::move(names);
  }
  std::vector<std::string> names;
  const auto decided = admitted_.find(point);
  if (decided == admitted_.end()) return names;
  for (const std::string& name : decided->second) {
    const auto is = [&](bool RankStanding::*what) {
      return std::ranges::any_of(
          ranks, [&](const RankStanding& rank) { return rank.peer.replica == name && rank.*what; });
    };
    if (is(&RankStanding::member)) continue;  // a repeated sync
    if (!is(&RankStanding::ready)) return std::nullopt;
    names.push_back(name);
  }
  return names;
}

bool Replicas::wait(std::uint32_t group, std::uint64_t point) const {
  if (point > last_point_) return !ready().empty();
  const auto decided = admitted_.find(point);
  return decided != admitted_.end() && groups_.contains(group);
}

// -- losses

void Replicas::departed(std::uint32_t group, const wire::Member& peer, const std::string& reason,
                        bool member, bool finished) {
  const std::string& name = peer.replica;
  dirty_ = true;
  if (name.empty() || name == dropping_) return;
  if (member && finished && !entering_.contains(name)) {
    // The other ranks should finish soon, too.
    finishing_.try_emplace(name, now_);
    return;
  }
  lost_.try_emplace(name, Loss{of_rank(group, reason), member});
}

void Replicas::away(std::uint32_t group, const wire::Member& peer, const std::string& reason) {
  const std::string& name = peer.replica;
  if (name.empty() || name == dropping_) return;
  dirty_ = true;
  if (entering_.contains(name)) {
    lost_.try_emplace(name, Loss{of_rank(group, reason), true});
  } else {
    away_[{name, group}] = {now_, reason};
  }
}

void Replicas::forget(const std::string& replica) {
  entering_.erase(replica);
  finishing_.erase(replica);
  for (auto& [point, names] : admitted_) std::erase(names, replica);
  std::erase_if(admitted_, [](const auto& item) { return item.second.empty(); });
}

void Replicas::reset() {
  lost_.clear();
  last_point_ = 0;
  admitted_.clear();
  entering_.clear();
  finishing_.clear();
}

void Replicas::forget_all() {
  reset();
  dirty_ = false;
  dropping_.clear();
  away_.clear();
  incomplete_.clear();
  noticed_.clear();
  recovering_since_.reset();
  recovering_ranks_ = 0;
}

// Evicts a lost replica. If it has members, newcomers of the same name may belong to its restart
// and stay, unless the replica was being admitted.
void Replicas::drop(const std::string& replica, const Loss& loss, Instant now) {
  const bool half_in = entering_.contains(replica);
  forget(replica);
  dropping_ = replica;
  const std::uint32_t ranks = this->ranks();
  const std::string reason = "a rank of its replica was lost: " + loss.reason;
  for (const auto& [id, group] : groups_) {
    if (id >= ranks) break;
    group->evict_rank(replica, loss.member || half_in, !loss.member || half_in, reason, now);
  }
  dropping_.clear();
}

// Removes replicas that have members but are neither complete, nor being admitted, nor finishing.
void Replicas::drop_incomplete(Instant now) {
  const Table table = this->table();
  for (const auto& [name, replica] : table) {
    const std::size_t members = replica.count(replica.member);
    if (members == replica.member.size()) {
      entering_.erase(name);
      continue;
    }
    const bool entering = entering_.contains(name);
    if (members == 0 && !entering) {
      finishing_.erase(name);
      continue;
    }
    if (finishing_.contains(name)) continue;
    for (std::uint32_t rank = 0; rank < replica.member.size(); ++rank) {
      if (replica.member[rank] != 0) continue;
      // If a group has lost all members, its state is gone: replicas being admitted must start
      // again.
      const auto group = groups_.find(rank);
      const bool there = group != groups_.end() && !group->second->record().members.empty();
      if (entering && there && replica.waiting[rank] != 0) continue;
      drop(name,
           {of_rank(rank, entering && !there ? "the members of its group are gone"
                                             : "it is not there any more"),
            true},
           now);
      break;
    }
  }
  const auto gone = [&](const std::string& name) { return !table.contains(name); };
  std::erase_if(entering_, gone);
  std::erase_if(finishing_, [&](const auto& item) { return gone(item.first); });
}

// -- settling

void Replicas::settle(bool recoveries, Instant now) {
  now_ = now;
  if (recovering()) end_recovery(recoveries, now);
  while (dirty_) {
    dirty_ = false;
    step(now);
  }
}

void Replicas::step(Instant now) {
  const std::uint32_t ranks = this->ranks();
  if (ranks == 0) return reset();
  for (const auto& [name, loss] : std::exchange(lost_, {})) drop(name, loss, now);
  if (recovering()) return;
  drop_incomplete(now);
  if (dirty_) return;
  std::uint64_t passed = last_point_;
  for (const auto& [id, group] : groups_) {
    if (id >= ranks) break;
    group->retry_admission(now);
    passed = std::min(passed, group->record().points);
  }
  // The point of a sync may be repeated until the next one is passed.
  admitted_.erase(admitted_.begin(), admitted_.lower_bound(passed));
  if (!dirty_) start_if_ready();
}

void Replicas::start_if_ready() {
  if (started()) return;
  std::uint32_t wanted = 0;
  const std::vector<std::string> names = founders(wanted);
  if (names.empty() || names.size() < wanted) return;
  reset();
  const std::uint32_t ranks = this->ranks();
  for (std::uint32_t rank = 0; rank < ranks; ++rank)
    last_point_ = std::max(last_point_, groups_.at(rank)->record().points);
  for (std::uint32_t rank = 0; rank < ranks; ++rank)
    groups_.at(rank)->start_with(names, last_point_);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) groups_.at(rank)->leave_behind();
}

void Replicas::recover(std::uint32_t ranks, Instant now) {
  if (recovering() || ranks == 0) return;
  reset();
  recovering_ranks_ = ranks;
  recovering_since_ = now;
}

void Replicas::end_recovery(bool recoveries, Instant now) {
  const std::uint32_t ranks = this->ranks();
  std::uint32_t back = 0;
  std::uint64_t points = 0;
  for (const auto& [id, group] : groups_) {
    if (id >= ranks) break;
    if (!group->record().members.empty()) ++back;
    points = std::max(points, group->record().points);
  }
  if (recoveries || (back < ranks && now - *recovering_since_ < options_.reconnect_timeout)) return;
  recovering_since_.reset();
  last_point_ = points;
  dirty_ = true;
}

void Replicas::on_time(Instant now) {
  const std::uint32_t ranks = this->ranks();
  if (ranks == 0) return;
  now_ = now;
  const Table table = this->table();
  // A rank has left regularly, but another rank of its replica has not.
  for (const auto& [name, since] : finishing_) {
    if (now - since < options_.reconnect_timeout) continue;
    const auto replica = table.find(name);
    if (replica == table.end()) continue;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      if (replica->second.member[rank] == 0) continue;
      if (groups_.at(rank)->busy(replica->second.members[rank])) continue;
      lost_.try_emplace(name, Loss{"another one left, and this one did not follow", true});
      dirty_ = true;
    }
  }
  for (auto it = away_.begin(); it != away_.end();) {
    const auto& [name, rank] = it->first;
    const auto replica = table.find(name);
    const bool back = replica != table.end() && rank < ranks &&
                      (replica->second.waiting[rank] != 0 || replica->second.member[rank] != 0);
    const bool over = !back && now - it->second.first >= options_.reconnect_timeout;
    if (over && replica != table.end()) {
      lost_.try_emplace(name, Loss{of_rank(rank, it->second.second), false});
      dirty_ = true;
    }
    it = back || over || replica == table.end() ? away_.erase(it) : std::next(it);
  }
  for (const auto& [name, replica] : table) {
    if (replica.count(replica.member) > 0 || replica.all(replica.waiting) ||
        replica.count(replica.waiting) == 0) {
      incomplete_.erase(name);
      noticed_.erase(name);
      continue;
    }
    const Instant since = incomplete_.try_emplace(name, now).first->second;
    if (now - since < kStragglerNotice || !noticed_.insert(name).second) continue;
    std::string missing;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      if (replica.waiting[rank] == 0) missing += " " + std::to_string(rank);
    }
    for (const auto& [id, group] : groups_) {
      if (id < ranks)
        group->tell_rank(name, "waiting for these ranks of replica " + name + ":" + missing);
    }
  }
  const auto gone = [&](const std::string& name) { return !table.contains(name); };
  std::erase_if(incomplete_, [&](const auto& item) { return gone(item.first); });
  std::erase_if(noticed_, gone);
}

}  // namespace pccl::master
