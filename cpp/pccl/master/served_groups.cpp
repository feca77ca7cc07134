#include "pccl/master/served_groups.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <variant>

namespace pccl::master {

Group* ServedGroups::find(std::uint32_t group) const {
  const auto it = groups_.find(group);
  return it == groups_.end() ? nullptr : it->second.get();
}

Quorum* ServedGroups::quorum(std::uint32_t group) {
  const auto it = quorums_.find(group);
  return it == quorums_.end() ? nullptr : &it->second;
}

const Quorum* ServedGroups::quorum(std::uint32_t group) const {
  const auto it = quorums_.find(group);
  return it == quorums_.end() ? nullptr : &it->second;
}

Quorum* ServedGroups::quorum_of(ConnectionId id) {
  if (quorums_.empty()) return nullptr;
  const ControlPeer* const connection = connections_.find(id);
  return connection == nullptr || !connection->group ? nullptr : quorum(*connection->group);
}

bool ServedGroups::member(ConnectionId id) const {
  const ControlPeer* const connection = connections_.find(id);
  if (connection == nullptr || !connection->group) return false;
  const Group* const known = find(*connection->group);
  return known != nullptr && !known->member_on(id).empty();
}

bool ServedGroups::begun(bool pairs) const {
  return std::ranges::any_of(groups_, [&](const auto& item) {
    const auto& [id, group] = item;
    return (pairs || id < kFirstPair) && !group->empty() && group->record().epoch > 0;
  });
}

// Whether the group has no peers, and no members that have to hear why.
bool ServedGroups::is_over(std::uint32_t group) const {
  return groups_.at(group)->empty() && !undecided_.contains(group);
}

bool ServedGroups::over() const {
  return std::ranges::all_of(groups_, [&](const auto& item) { return is_over(item.first); });
}

wire::Census ServedGroups::census() const {
  wire::Census census;
  for (const auto& [id, group] : groups_) {
    const auto size = static_cast<std::uint32_t>(group->record().members.size());
    if (size == 0 || id >= kFirstPair) continue;
    census.members += size;
    ++census.groups;
    census.largest_group = std::max(census.largest_group, size);
  }
  return census;
}

// -- groups that begin and end

bool ServedGroups::has_room(std::uint32_t group) {
  if (groups_.contains(group) || groups_.size() < options_.limits.max_groups) return true;
  std::erase_if(groups_, [&](const auto& item) { return is_over(item.first); });
  std::erase_if(quorums_, [&](const auto& item) { return !groups_.contains(item.first); });
  return groups_.size() < options_.limits.max_groups;
}

Group& ServedGroups::group_for(std::uint32_t id) {
  auto& group = groups_[id];
  if (!group) {
    group = std::make_unique<Group>(id, options_, around_);
    if (!options_.place.alone()) {
      const std::uint32_t term = options_.place.term_after(abandoned_);
      quorums_.try_emplace(id, Quorum(term));
      served_terms_.insert(term);
    }
  }
  return *group;
}

void ServedGroups::join(ConnectionId id, ControlPeer& connection, const wire::Join& join,
                        Instant now) {
  if (!has_room(join.group)) return connections_.refuse(id, Code::refused, "too many groups");
  const std::string why_not = around_.replicas().objection(join);
  if (!why_not.empty()) return connections_.refuse(id, Code::refused, why_not);
  wire::Join seen = join;
  // The connection's remote address is most likely the best one to reach the peer.
  if (!join.addresses.empty()) {
    const wire::Address source{connection.address, join.addresses.front().port};
    std::erase(seen.addresses, source);
    seen.addresses.insert(seen.addresses.begin(), source);
  }
  connection.group = join.group;
  group_for(join.group).add_candidate(id, seen, connection.address, now);
}

void ServedGroups::put(std::uint32_t group, Quorum quorum) {
  served_terms_.insert(quorum.term());
  if (served_terms_.size() > kMaxServedTerms) served_terms_.erase(served_terms_.begin());
  quorums_.insert_or_assign(group, std::move(quorum));
}

std::uint32_t ServedGroups::new_term(std::uint32_t term) const {
  term = options_.place.term_after(term);
  while (served_terms_.contains(term)) term = options_.place.term_after(term);
  return term;
}

void ServedGroups::forget(std::uint32_t id) {
  const Group* const group = find(id);
  if (group == nullptr || !is_over(id)) return;
  if (group->record().epoch == 0 || id >= kFirstPair) erase(id);
}

void ServedGroups::forget_empty() {
  for (auto at = groups_.begin(); at != groups_.end();) forget((at++)->first);
}

// Its members may go on at another master. A group that begins here with its number has a higher
// term, so they do not take it for their own.
void ServedGroups::abandon(std::uint32_t group) {
  if (group < kFirstPair) {
    outbox_.log("group " + std::to_string(group) +
                ": this master gives it up: a majority of its members cannot be reached");
    run_.quiet_since = outbox_.now();
  }
  connections_.part_from(group, [](ConnectionId) {});
  if (group < kFirstPair) abandoned_ = std::max(abandoned_, quorums_.at(group).term());
  erase(group);
}

void ServedGroups::erase(std::uint32_t group) {
  groups_.erase(group);
  quorums_.erase(group);
  undecided_.erase(group);
}

void ServedGroups::clear() {
  groups_.clear();
  quorums_.clear();
  undecided_.clear();
}

// -- messages

void ServedGroups::send(ConnectionId to, std::uint64_t collected, const wire::Message& message) {
  Quorum* const quorum = quorum_of(to);
  if (quorum == nullptr) return connections_.send(to, run_.term, collected, message);
  for (const Quorum::Held& now : quorum->pass(to, collected, message))
    connections_.send(now.to, quorum->term(), now.collected, *now.message);
}

void ServedGroups::close(ConnectionId id) {
  Quorum* const quorum = quorum_of(id);
  if (quorum == nullptr || !quorum->holds_closing(id)) connections_.close(id);
}

void ServedGroups::send_heartbeats() {
  for (const auto& [id, connection] : connections_.all()) {
    const Group* const group = connection.group ? find(*connection.group) : nullptr;
    if (group == nullptr) continue;
    const std::uint64_t collected = group->log().collected();
    if (Quorum* const votes = quorum(*connection.group)) {
      connections_.send(id, votes->term(), votes->collected(collected), wire::Heartbeat{});
    } else {
      connections_.send(id, run_.term, collected, wire::Heartbeat{});
    }
  }
}

// -- votes

void ServedGroups::appended(std::uint32_t group, const wire::LogEntry& entry) {
  Quorum* const votes = quorum(group);
  if (votes == nullptr) return;
  votes->appended(entry, outbox_.now());
  if (std::holds_alternative<wire::EpochRecord>(entry.what)) undecided_.insert(group);
}

std::set<Seat> ServedGroups::voters(std::uint32_t group, const Quorum& quorum) const {
  std::set<Seat> seats;
  for (const auto& [id, connection] : connections_.all()) {
    if (!connection.closing && connection.group == group && quorum.accepts(connection.seat))
      seats.insert(connection.seat);
  }
  return seats;
}

void ServedGroups::hear_vote(const ControlPeer& connection, const wire::Frame& frame) {
  Quorum* const votes = quorum(*connection.group);
  if (votes == nullptr) return;
  if (std::holds_alternative<wire::Leave>(frame.message)) votes->left(connection.seat);
  const auto* accept = std::get_if<wire::Accept>(&frame.message);
  if (accept != nullptr && frame.envelope.term == votes->term())
    votes->accepted(connection.seat, accept->ordinal);
}

void ServedGroups::propose_to(ConnectionId id, const Quorum& quorum) {
  const ControlPeer* const connection = connections_.open(id);
  if (connection == nullptr || quorum.proposal() == nullptr || !quorum.accepts(connection->seat))
    return;
  connections_.send(id, quorum.term(), 0, wire::Propose{*quorum.proposal()});
}

void ServedGroups::settle(Instant now) {
  for (auto at = undecided_.begin(); at != undecided_.end();) {
    const std::uint32_t group = *at;
    Quorum* const votes = quorum(group);
    const bool open = votes != nullptr && !settle(group, *votes, now);
    at = open ? std::next(at) : undecided_.erase(at);
  }
}

// True: everything is decided.
bool ServedGroups::settle(std::uint32_t group, Quorum& quorum, Instant now) {
  while (quorum.proposal() != nullptr) {
    if (quorum.fresh_proposal()) {
      for (const auto& [id, connection] : connections_.all())
        if (connection.group == group) propose_to(id, quorum);
    }
    if (!quorum.decide(voters(group, quorum), now)) return false;
    for (const Quorum::Held& held : quorum.released()) {
      if (held.message) {
        connections_.send(held.to, quorum.term(), held.collected, *held.message);
      } else {
        connections_.close(held.to);
      }
    }
  }
  return true;
}

}  // namespace pccl::master
