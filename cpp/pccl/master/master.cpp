#include "pccl/master/master.h"

#include <algorithm>
#include <utility>

namespace pccl::master {
namespace {

// At least: peers that wait pause between two attempts.
constexpr Duration kLeastQuiet = std::chrono::milliseconds(500);

}  // namespace

std::uint64_t next_run(std::uint64_t run) {
  std::uint64_t mixed = run + 0x9e3779b97f4a7c15;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
  return (mixed ^ (mixed >> 31)) | 1;
}

Duration Master::quiet_time() const {
  return std::max<Duration>(2 * options_.heartbeat_interval, kLeastQuiet);
}

const Group* Master::group(std::uint32_t id) const {
  const auto it = groups_.find(id);
  return it == groups_.end() ? nullptr : it->second.get();
}

Group& Master::group_for(std::uint32_t id) {
  auto& group = groups_[id];
  if (!group) {
    group.reset(new Group(id, options_, *this));
    if (!options_.place.alone()) {
      const std::uint32_t term = options_.place.term_after(given_up_);
      quorums_.try_emplace(id, Quorum(term));
      served_terms_.insert(term);
    }
  }
  return *group;
}

bool Master::anonymous(ConnectionId connection) const {
  const auto it = connections_.find(connection);
  return it == connections_.end() || (!it->second.group && !it->second.recovers);
}

bool Master::departed(const PeerId& peer) const {
  return undecided_.empty() &&
         std::ranges::none_of(groups_, [&](const auto& item) { return item.second->has(peer); });
}

bool Master::member(ConnectionId connection) const {
  const auto it = connections_.find(connection);
  if (it == connections_.end() || !it->second.group) return false;
  const Group* known = group(*it->second.group);
  return known != nullptr && !known->member_on(connection).empty();
}

bool Master::may_be_long(ConnectionId connection) const {
  const auto it = connections_.find(connection);
  if (it == connections_.end()) return false;
  // A promise has an epoch.
  const bool promises = it->second.recovers && !options_.place.alone();
  return it->second.asked || promises || member(connection);
}

// Whether the group has no peers, and no members that have to hear why.
bool Master::is_over(std::uint32_t group) const {
  return groups_.at(group)->empty() && !undecided_.contains(group);
}

// Drops a group that is empty, and which never had a member or is a pair.
void Master::forget_group(std::uint32_t id) {
  const auto it = groups_.find(id);
  if (it == groups_.end() || !is_over(id)) return;
  if (it->second->record().epoch != 0 && id < kFirstPair) return;
  groups_.erase(it);
  quorums_.erase(id);
  undecided_.erase(id);
}

// Keeps empty groups for late peers while there is room. False: there is no room.
bool Master::make_room_for_group() {
  if (groups_.size() < options_.limits.max_groups) return true;
  std::erase_if(groups_, [&](const auto& item) { return is_over(item.first); });
  std::erase_if(quorums_, [&](const auto& item) { return !groups_.contains(item.first); });
  return groups_.size() < options_.limits.max_groups;
}

Master::Connection* Master::open(ConnectionId id) {
  const auto it = connections_.find(id);
  return it == connections_.end() || it->second.closing ? nullptr : &it->second;
}

Duration Master::tick() const {
  Duration tick =
      std::min<Duration>(options_.heartbeat_interval / 2, std::chrono::milliseconds(500));
  for (const auto& [id, group] : groups_) {
    if (group->hurried()) tick = std::min<Duration>(tick, std::chrono::milliseconds(50));
  }
  if (!options_.place.alone() && !(recoveries_.empty() && appeals_.empty()))
    tick = std::min<Duration>(tick, std::chrono::milliseconds(50));
  return tick;
}

void Master::send(ConnectionId to, std::uint64_t collected, const wire::Message& message) {
  Quorum* const quorum = quorum_of(to);
  if (quorum == nullptr) return send_now(to, term_, collected, message);
  for (const Quorum::Held& now : quorum->pass(to, collected, message))
    send_now(now.to, quorum->term(), now.collected, *now.message);
}

void Master::send_now(ConnectionId to, std::uint32_t term, std::uint64_t collected,
                      const wire::Message& message) {
  if (open(to) == nullptr) return;
  if (const auto* welcome = std::get_if<wire::Welcome>(&message)) {
    wire::Welcome complete = *welcome;
    complete.masters = options_.place.masters;
    actions_.emplace_back(Send{to, wire::encode({run_, term, collected}, complete)});
    return;
  }
  actions_.emplace_back(Send{to, wire::encode({run_, term, collected}, message)});
}

void Master::close(ConnectionId id) {
  Quorum* const quorum = quorum_of(id);
  if (quorum == nullptr || !quorum->holds_closing(id)) close_now(id);
}

void Master::close_now(ConnectionId id) {
  Connection* const connection = open(id);
  if (connection == nullptr) return;
  connection->closing = true;
  actions_.emplace_back(Close{id});
}

void Master::refuse(ConnectionId connection, Code code, const std::string& reason) {
  const Connection* const known = open(connection);
  if (known == nullptr) return;
  // A peer ignores a term below the one that it has followed.
  const std::uint32_t term = std::max(term_, known->term);
  send_now(connection, term, 0, wire::Refused{code, reason});
  close_now(connection);
}

wire::Census Master::census() {
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

std::optional<std::pair<PeerId, PeerId>> Master::expect_relay(const PeerId& one,
                                                              const PeerId& other,
                                                              const std::string& names) {
  const std::pair<PeerId, PeerId> tokens{PeerId::random(), PeerId::random()};
  actions_.emplace_back(ExpectRelay{one, other, tokens.first, tokens.second, names});
  return tokens;
}

void Master::on_connect(ConnectionId connection, const std::string& address, Instant now) {
  at(now);
  Connection& made = connections_[connection];
  made.address = address;
  made.since = now;
}

void Master::on_disconnect(ConnectionId id, Instant now) {
  at(now);
  const auto it = connections_.find(id);
  if (it == connections_.end()) return;
  const std::optional<std::uint32_t> group = it->second.group;
  questions_.erase(it->second.question);
  connections_.erase(it);
  formers_.erase(id);
  forget_report(id);
  if (!group) return;
  const auto found = groups_.find(*group);
  if (found != groups_.end()) found->second->on_disconnect(id, now);
  settle_replicas(now);
  forget_group(*group);
  settle_quorums(now);
}

// Applies the consequences of an event in one group to the others, before anything is sent.
void Master::settle_replicas(Instant now) {
  const auto recovery = recoveries_.begin();
  const bool more = recovery != recoveries_.end() && recovery->first < replicas_.ranks();
  replicas_.settle(more, now);
}

void Master::on_garbage(ConnectionId id, const Error& error, Instant now) {
  at(now);
  const Connection* const connection = open(id);
  if (connection == nullptr) return;
  log_rarely("connection from " + connection->address + " refused: " + error.reason, now);
  if (connection->group) {
    const auto found = groups_.find(*connection->group);
    if (found == groups_.end()) return close_now(id);  // the group has ended meanwhile
    found->second->evict(id, Code::evicted, "protocol misuse: " + error.reason, now);
  } else {
    refuse(id, Code::refused, error.reason);
  }
  settle_replicas(now);
  settle_quorums(now);
}

void Master::on_frame(ConnectionId id, const wire::Frame& frame, Instant now) {
  at(now);
  Connection* const opened = open(id);
  if (opened == nullptr) return;
  Connection& connection = *opened;
  if (connection.group) {
    if (frame.envelope.run != run_)
      return on_garbage(id, {Code::refused, "a message of another run"}, now);
    if (!options_.place.alone()) {
      hear_vote(connection, frame);
      if (std::holds_alternative<wire::Accept>(frame.message)) return settle_quorums(now);
      // It came late: a majority of others had promised before.
      if (std::holds_alternative<wire::Promise>(frame.message)) return;
    }
    const auto found = groups_.find(*connection.group);
    if (found != groups_.end()) {
      found->second->on_message(id, frame, now);
      const auto* const tried = std::get_if<wire::Tried>(&frame.message);
      if (tried != nullptr) on_tried(found->second->member_on(id), *tried, now);
    }
    settle_replicas(now);
    return settle_quorums(now);
  }
  if (!options_.place.alone()) {
    if (std::holds_alternative<wire::MayFound>(frame.message)) {
      connection.may_found = true;
      return;
    }
    if (std::holds_alternative<wire::Promise>(frame.message) && connection.recovers)
      return promised(id, connection, frame, now);
    const bool joins = std::holds_alternative<wire::Join>(frame.message);
    if ((joins || std::holds_alternative<wire::Rejoin>(frame.message)) && connection.recovers)
      return on_garbage(id, {Code::refused, "a second Join or Rejoin"}, now);
    if (joins) return join_one(id, connection, frame, now);
    if (std::holds_alternative<wire::Rejoin>(frame.message))
      return rejoin_one(id, connection, frame, now);
  }
  if (const auto* first = std::get_if<wire::Join>(&frame.message)) {
    // The newcomer's run is unknown to this restarted master, or is being rebuilt. The newcomer
    // must not found another run here, but try again once the members have returned. If none comes,
    // that run had not begun, or is over.
    if (frame.envelope.run != 0 && frame.envelope.run != run_ && are_on_their_way(now))
      return close(id);
    if (recoveries_.contains(first->group)) return close(id);
    if (replicas_.recovering() && !groups_.contains(first->group)) return close(id);
    join(id, connection, *first, now);
    return settle_replicas(now);
  }
  if (std::holds_alternative<wire::Rejoin>(frame.message)) {
    rejoin(id, connection, frame, now);
    return settle_replicas(now);
  }
  if (const auto* part = std::get_if<wire::LogPart>(&frame.message); part && connection.asked) {
    log_part(id, connection, *part, now);
    return settle_replicas(now);
  }
  if (const auto* inquiry = std::get_if<wire::Inquiry>(&frame.message))
    return inquire(id, connection, *inquiry, now);
  if (std::holds_alternative<wire::AskStatus>(frame.message))
    return answer_status(id, connection, now);
  if (const auto* order = std::get_if<wire::Command>(&frame.message)) {
    command(id, connection, *order, now);
    settle_replicas(now);
    return settle_quorums(now);
  }
  on_garbage(id, {Code::refused, "the first message must be Join or Rejoin"}, now);
}

void Master::join(ConnectionId id, Connection& connection, const wire::Join& join, Instant now) {
  if (!groups_.contains(join.group) && !make_room_for_group()) {
    return refuse(id, Code::refused, "too many groups");
  }
  if (const std::string why_not = replicas_.objection(join); !why_not.empty())
    return refuse(id, Code::refused, why_not);
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

void Master::on_time(Instant now) {
  at(now);
  check_quorums(now);
  std::vector<ConnectionId> anonymous;
  std::vector<ConnectionId> owing;  // a log
  std::vector<ConnectionId> left;   // newcomers whose recovery is over
  for (const auto& [id, connection] : connections_) {
    if (connection.closing) continue;
    if (!connection.group && !connection.recovers && now - connection.since >= kHandshakeTimeout)
      anonymous.push_back(id);
    if (connection.asked && !connection.asked->complete &&
        now - connection.asked->since >= kHandshakeTimeout)
      owing.push_back(id);
    if (connection.join && !recoveries_.contains(connection.join->group)) left.push_back(id);
  }
  for (const ConnectionId id : left) close_now(id);
  for (const ConnectionId id : owing) {
    if (!options_.place.alone()) {
      close_now(id);
      forget_report(id);
      continue;
    }
    refuse(id, Code::evicted, "its log did not arrive within the handshake timeout");
    forget_report(id);
  }
  for (const ConnectionId id : anonymous)
    refuse(id, Code::refused, "no Join within the handshake timeout");
  std::vector<std::uint32_t> recovering;
  for (const auto& [id, recovery] : recoveries_) recovering.push_back(id);
  for (const std::uint32_t id : recovering) recover_if_ready(id, now);
  std::vector<std::uint32_t> appealed;
  for (const auto& [id, appeals] : appeals_) appealed.push_back(id);
  for (const std::uint32_t id : appealed) hear_appeals(id, now);
  settle_formers(now);
  for (const auto& [id, group] : groups_) group->on_time(now);
  replicas_.on_time(now);
  settle_replicas(now);
  answer_questions(now);
  settle_quorums(now);
  if (now - last_heartbeat_ >= options_.heartbeat_interval) {
    last_heartbeat_ = now;
    for (const auto& [id, connection] : connections_) {
      if (!connection.group) continue;
      const auto group = groups_.find(*connection.group);
      if (group == groups_.end()) continue;
      const std::uint64_t collected = group->second->log().collected();
      Quorum* const quorum = quorum_of(id);  // a heartbeat never waits
      send_now(id, quorum == nullptr ? term_ : quorum->term(),
               quorum == nullptr ? collected : quorum->collected(collected), wire::Heartbeat{});
    }
  }
}

}  // namespace pccl::master
