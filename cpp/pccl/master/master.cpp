#include "pccl/master/master.h"

#include <algorithm>
#include <variant>

namespace pccl::master {

bool Master::anonymous(ConnectionId id) const {
  const ControlPeer* const connection = connections_.find(id);
  return connection == nullptr || (!connection->group && !connection->recovers);
}

bool Master::departed(const PeerId& peer) const {
  return !served_.undecided() && std::ranges::none_of(served_.all(), [&](const auto& item) {
    return item.second->has(peer);
  });
}

bool Master::may_be_long(ConnectionId id) const {
  const ControlPeer* const connection = connections_.find(id);
  if (connection == nullptr) return false;
  // A promise has an epoch.
  const bool promises = connection->recovers && !options_.place.alone();
  return connection->asked || promises || member(id);
}

Duration Master::tick() const {
  constexpr Duration kHurry = std::chrono::milliseconds(50);
  const bool takes_over =
      !options_.place.alone() && !(returning_.recoveries.empty() && returning_.appeals.empty());
  const bool hurried = takes_over || std::ranges::any_of(served_.all(), [](const auto& item) {
                         return item.second->hurried();
                       });
  const Duration tick =
      std::min<Duration>(options_.heartbeat_interval / 2, std::chrono::milliseconds(500));
  return hurried ? std::min(tick, kHurry) : tick;
}

std::optional<std::pair<RelayToken, RelayToken>> Master::expect_relay(const PeerId& one,
                                                                      const PeerId& other,
                                                                      const std::string& names) {
  const std::pair<RelayToken, RelayToken> tokens{RelayToken::random(), RelayToken::random()};
  outbox_.add(ExpectRelay{one, other, tokens.first, tokens.second, names});
  return tokens;
}

// -- connections

void Master::on_connect(ConnectionId id, const std::string& address, Instant now) {
  outbox_.at(now);
  connections_.add(id, address);
}

void Master::on_disconnect(ConnectionId id, Instant now) {
  outbox_.at(now);
  const ControlPeer* const connection = connections_.find(id);
  if (connection == nullptr) return;
  const std::optional<std::uint32_t> group = connection->group;
  inquiries_.forget(connection->question);
  connections_.erase(id);
  returning_.formers.erase(id);
  returning_.forget(id);
  if (!group) return;
  if (Group* const served = served_.find(*group)) served->on_disconnect(id, now);
  settle_replicas(now);
  served_.forget(*group);
  served_.settle(now);
}

void Master::on_garbage(ConnectionId id, const Error& error, Instant now) {
  outbox_.at(now);
  const ControlPeer* const connection = connections_.open(id);
  if (connection == nullptr) return;
  outbox_.log_rarely("connection from " + connection->address + " refused: " + error.reason);
  if (connection->group) {
    Group* const group = served_.find(*connection->group);
    if (group == nullptr) return connections_.close(id);  // the group has ended meanwhile
    group->evict(id, Code::evicted, "protocol misuse: " + error.reason, now);
  } else {
    connections_.refuse(id, Code::refused, error.reason);
  }
  settle_replicas(now);
  served_.settle(now);
}

void Master::on_tried(ConnectionId for_whom, bool reached, const std::string& reason, Instant now) {
  outbox_.at(now);
  inquiries_.on_tried(for_whom, reached, reason, now);
}

// -- messages

void Master::on_frame(ConnectionId id, const wire::Frame& frame, Instant now) {
  outbox_.at(now);
  ControlPeer* const connection = connections_.open(id);
  if (connection == nullptr) return;
  if (connection->group) {
    hear_peer(id, *connection, frame, now);
  } else if (options_.place.alone() || !hear_several(id, *connection, frame, now)) {
    hear_first(id, *connection, frame, now);
  }
}

// A message of a peer to its group.
void Master::hear_peer(ConnectionId id, ControlPeer& connection, const wire::Frame& frame,
                       Instant now) {
  if (frame.envelope.run != run_.id)
    return on_garbage(id, {Code::refused, "a message of another run"}, now);
  if (!options_.place.alone()) {
    served_.hear_vote(connection, frame);
    if (std::holds_alternative<wire::Accept>(frame.message)) return served_.settle(now);
    // It came late: a majority of others had promised before.
    if (std::holds_alternative<wire::Promise>(frame.message)) return;
  }
  if (Group* const group = served_.find(*connection.group)) {
    group->on_message(id, frame, now);
    const auto* const tried = std::get_if<wire::Tried>(&frame.message);
    if (tried != nullptr) inquiries_.on_tried(group->member_on(id), *tried, now);
  }
  settle_replicas(now);
  served_.settle(now);
}

// Several masters: what a peer says before it is in a group. False: no such message.
bool Master::hear_several(ConnectionId id, ControlPeer& connection, const wire::Frame& frame,
                          Instant now) {
  const bool joins = std::holds_alternative<wire::Join>(frame.message);
  const bool returns = std::holds_alternative<wire::Rejoin>(frame.message);
  if (std::holds_alternative<wire::MayFound>(frame.message)) {
    connection.may_found = true;
  } else if (std::holds_alternative<wire::Promise>(frame.message) && connection.recovers) {
    takeover_.on_promise(id, connection, frame, now);
  } else if ((joins || returns) && connection.recovers) {
    on_garbage(id, {Code::refused, "a second Join or Rejoin"}, now);
  } else if (joins) {
    takeover_.on_join(id, connection, frame, now);
  } else if (returns) {
    takeover_.on_rejoin(id, connection, frame, now);
  } else {
    return false;
  }
  return true;
}

void Master::hear_first(ConnectionId id, ControlPeer& connection, const wire::Frame& frame,
                        Instant now) {
  if (const auto* first = std::get_if<wire::Join>(&frame.message)) {
    if (restart_.must_wait(frame.envelope.run, first->group, now)) return connections_.close(id);
    served_.join(id, connection, *first, now);
    return settle_replicas(now);
  }
  if (std::holds_alternative<wire::Rejoin>(frame.message)) {
    if (connection.recovers) return on_garbage(id, {Code::refused, "a second Rejoin"}, now);
    restart_.on_rejoin(id, connection, frame, now);
    return settle_replicas(now);
  }
  if (const auto* part = std::get_if<wire::LogPart>(&frame.message); part && connection.asked) {
    const std::uint32_t group = connection.asked->group;
    if (returning_.on_log_part(id, connection, *part, now)) recover_if_ready(group, now);
    return settle_replicas(now);
  }
  if (const auto* inquiry = std::get_if<wire::Inquiry>(&frame.message))
    return inquiries_.on_inquiry(id, connection, *inquiry, now);
  if (std::holds_alternative<wire::AskStatus>(frame.message))
    return operators_.on_question(id, connection, now);
  if (const auto* order = std::get_if<wire::Command>(&frame.message)) {
    operators_.on_command(id, connection, *order, now);
    settle_replicas(now);
    return served_.settle(now);
  }
  on_garbage(id, {Code::refused, "the first message must be Join or Rejoin"}, now);
}

// -- consequences

void Master::recover_if_ready(std::uint32_t group, Instant now) {
  if (options_.place.alone()) {
    restart_.rebuild_if_ready(group, now);
  } else {
    takeover_.take_over_if_ready(group, now);
  }
}

// Applies the consequences of an event in one group to the others, before anything is sent.
void Master::settle_replicas(Instant now) {
  const auto& recoveries = returning_.recoveries;
  replicas_.settle(!recoveries.empty() && recoveries.begin()->first < replicas_.ranks(), now);
}

// Closes connections whose peers have not said in time who they are, or have not sent their log,
// and those of newcomers whose recovery is over.
void Master::close_late(Instant now) {
  std::vector<ConnectionId> anonymous;
  std::vector<ConnectionId> owing;  // a log
  std::vector<ConnectionId> left;   // by the recovery
  for (const auto& [id, connection] : connections_.all()) {
    if (connection.closing) continue;
    if (!connection.group && !connection.recovers && now - connection.since >= kHandshakeTimeout)
      anonymous.push_back(id);
    if (connection.asked && !connection.asked->complete &&
        now - connection.asked->since >= kHandshakeTimeout)
      owing.push_back(id);
    if (connection.join && !returning_.recoveries.contains(connection.join->group))
      left.push_back(id);
  }
  for (const ConnectionId id : left) connections_.close(id);
  for (const ConnectionId id : owing) {
    if (options_.place.alone()) {
      connections_.refuse(id, Code::evicted, "its log did not arrive within the handshake timeout");
    } else {
      connections_.close(id);
    }
    returning_.forget(id);
  }
  for (const ConnectionId id : anonymous)
    connections_.refuse(id, Code::refused, "no Join within the handshake timeout");
}

void Master::on_time(Instant now) {
  outbox_.at(now);
  if (!options_.place.alone()) takeover_.check_quorums(now);
  close_late(now);
  std::vector<std::uint32_t> recovering;
  for (const auto& [id, recovery] : returning_.recoveries) recovering.push_back(id);
  for (const std::uint32_t id : recovering) recover_if_ready(id, now);
  takeover_.hear_appeals(now);
  restart_.settle_formers(now);
  for (const auto& [id, group] : served_.all()) group->on_time(now);
  replicas_.on_time(now);
  settle_replicas(now);
  inquiries_.answer(now);
  served_.settle(now);
  served_.forget_empty();  // their last member was away for too long
  if (now - last_heartbeat_ < options_.heartbeat_interval) return;
  last_heartbeat_ = now;
  served_.send_heartbeats();
}

}  // namespace pccl::master
