#include "tests/simulation/sim_network.h"

#include <algorithm>
#include <utility>

namespace pccl::simulation {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

std::uint64_t Random::next() {
  state_ += 0x9e3779b97f4a7c15;
  std::uint64_t mixed = state_;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
  return mixed ^ (mixed >> 31);
}

void Timeline::at(Instant when, std::function<void()> what) {
  events_due_.push({std::max(when, now_), planned_++, std::move(what)});
}

bool Timeline::step() {
  if (events_due_.empty()) return false;
  now_ = events_due_.top().when;
  const std::function<void()> what = std::move(const_cast<Event&>(events_due_.top()).what);
  events_due_.pop();
  ++events_;
  what();
  return true;
}

// -- one connection

Connection::Connection(Network& network, NodeId dialler, NodeId listener, std::size_t capacity,
                       bool local)
    : network_(network), capacity_(capacity), local_(local) {
  sides_[0].node = dialler;
  sides_[1].node = listener;
  for (Direction& direction : directions_) {
    // Some stripes are ten times slower than others.
    direction.latency =
        network.slowness * static_cast<std::int64_t>(network.random_.chance(0.1) ? 10 : 1);
  }
}

std::size_t Connection::room(int side) const {
  if (!open(side)) return 0;
  const std::size_t used = directions_[index(side)].used;
  return capacity_ > used ? capacity_ - used : 0;
}

void Connection::write(int side, wire::Bytes bytes) {
  if (!open(side) || bytes.empty()) return;
  directions_[index(side)].used += bytes.size();
  send(side, std::move(bytes), false);
}

void Connection::send(int side, wire::Bytes bytes, bool last) {
  if (dead_) return;
  Direction& direction = directions_[index(side)];
  const Duration delay = network_.random_.duration(direction.latency / 4, direction.latency * 2);
  const Instant due = std::max(direction.last_due, network_.timeline_.now() + delay);
  direction.last_due = due;
  direction.flying.push_back({due, std::move(bytes), last});
  network_.timeline_.at(due, [self = shared_from_this(), side] { self->deliver(side); });
}

void Connection::deliver(int side) {
  if (dead_) return;
  Direction& direction = directions_[index(side)];
  const int reader = 1 - side;
  const Instant now = network_.timeline_.now();
  const NodeId from = sides_[index(side)].node;
  const NodeId to = sides_[index(reader)].node;
  const Instant blocked = relayed_ ? std::max(network_.blocked_until(from, kMasterNode),
                                              network_.blocked_until(kMasterNode, to))
                                   : network_.blocked_until(from, to);
  const Instant free = std::max(direction.stalled_until, blocked);
  if (free > now) {
    if (free == Instant::max()) return;
    const Duration again = network_.random_.duration(milliseconds(1), milliseconds(300));
    network_.timeline_.at(free + again, [self = shared_from_this(), side] { self->deliver(side); });
    return;
  }
  bool news = false;
  while (!direction.flying.empty() && direction.flying.front().due <= now) {
    Packet packet = std::move(direction.flying.front());
    direction.flying.pop_front();
    news = true;
    if (!open(reader)) {
      // The reader is gone: drop the bytes.
      direction.used -= packet.bytes.size();
      if (packet.last) continue;
      // The writer sees a reset, after all bytes that the reader sent before it closed.
      const Instant before = directions_[index(reader)].last_due;
      reset(side, std::max(direction.latency, before - now));
      continue;
    }
    if (packet.last) direction.finished = true;
    direction.arrived.insert(direction.arrived.end(), packet.bytes.begin(), packet.bytes.end());
  }
  if (news) notify(reader);
}

void Connection::notify(int side) {
  const auto self = shared_from_this();
  Side& end = sides_[index(side)];
  if (!end.open || !end.ready) return;
  const auto ready = end.ready;  // the handler may replace itself
  ready();
}

void Connection::reset(int side, Duration delay) {
  network_.timeline_.after(delay, [self = shared_from_this(), side] {
    Side& end = self->sides_[index(side)];
    if (!end.open || end.broken) return;
    end.broken = true;
    self->notify(side);
  });
}

std::span<const std::uint8_t> Connection::readable(int side) const {
  const Direction& direction = directions_[index(1 - side)];
  return std::span(direction.arrived).subspan(direction.read);
}

void Connection::consume(int side, std::size_t bytes) {
  Direction& direction = directions_[index(1 - side)];
  direction.read += bytes;
  direction.used -= bytes;
  if (direction.read == direction.arrived.size()) {
    direction.arrived.clear();
    direction.read = 0;
  }
  const int writer = 1 - side;
  network_.timeline_.after(direction.latency / 4,
                           [self = shared_from_this(), writer] { self->notify(writer); });
}

bool Connection::ended(int side) const {
  return sides_[index(side)].broken ||
         (directions_[index(1 - side)].finished && readable(side).empty());
}

void Connection::close(int side) {
  Side& end = sides_[index(side)];
  if (!end.open) return;
  end.open = false;
  end.ready = nullptr;
  Direction& unread = directions_[index(1 - side)];
  unread.arrived.clear();
  unread.read = 0;
  send(side, {}, true);
}

void Connection::cut(int half_open) {
  dead_ = true;
  for (int side = 0; side < 2; ++side) {
    if (side == half_open) continue;
    const bool at_once = network_.random_.chance(0.5);
    reset(side, at_once ? Duration(0) : network_.random_.duration(milliseconds(0), seconds(2)));
  }
}

bool Connection::quiet() const {
  if (dead_ || !sides_[0].open || !sides_[1].open) return false;
  return std::all_of(directions_.begin(), directions_.end(), [](const Direction& direction) {
    return direction.flying.empty() && direction.read == direction.arrived.size();
  });
}

// -- the network

void Network::dial(NodeId from, NodeId to, std::size_t capacity,
                   std::function<void(ConnectionPtr)> done, bool memory) {
  if (!memory && nat_of(to) != 0 && nat_of(to) != nat_of(from)) to = kNowhere;
  const bool void_address = !memory && to == kNowhere && random_.chance(0.5);
  const Duration delay = random_.duration(slowness / 2, slowness * 3);
  const Instant free = std::max(blocked_until(from, to), blocked_until(to, from));
  const Duration patience = random_.duration(seconds(1), seconds(4));
  if (void_address || (!memory && free > timeline_.now() + patience)) {
    timeline_.after(patience, [done = std::move(done)] { done(nullptr); });
    return;
  }
  const bool local = random_.chance(0.2) || memory;
  const Instant when = (memory ? timeline_.now() : std::max(timeline_.now(), free)) + delay;
  timeline_.at(when, [this, from, to, capacity, local, memory, done = std::move(done)]() mutable {
    const auto listener = listeners_.find(to);
    if (listener == listeners_.end()) {
      timeline_.after(slowness, [done = std::move(done)] { done(nullptr); });
      return;
    }
    auto connection = std::make_shared<Connection>(*this, from, to, capacity, local);
    connection->memory_ = memory;
    connections_.push_back(connection);
    // Either end may see the connection first.
    timeline_.after(random_.duration(Duration(0), slowness),
                    [connection, done = std::move(done)] { done(connection); });
    timeline_.after(random_.duration(Duration(0), slowness), [this, connection, to] {
      const auto still = listeners_.find(to);
      if (still == listeners_.end()) return connection->close(1);
      const Accept accept = still->second;
      accept(connection);
    });
  });
}

ConnectionPtr Network::relay(NodeId one, NodeId other, std::size_t capacity) {
  auto connection = std::make_shared<Connection>(*this, one, other, capacity, false);
  connection->relayed_ = true;
  connections_.push_back(connection);
  return connection;
}

void Network::sever(NodeId one, NodeId other) {
  for (const auto& weak : connections_) {
    const ConnectionPtr connection = weak.lock();
    if (connection && connection->memory() &&
        std::minmax(connection->node(0), connection->node(1)) == std::minmax(one, other))
      connection->cut();
  }
}

void Network::kill(NodeId node) {
  stop_listening(node);
  if (node == kMasterNode) {
    for (const ConnectionPtr& connection : connections())
      if (connection->relayed()) connection->cut();
  }
  for (const auto& weak : connections_) {
    const ConnectionPtr connection = weak.lock();
    if (!connection) continue;
    for (int side = 0; side < 2; ++side) {
      if (connection->node(side) != node || !connection->open(side)) continue;
      if (random_.chance(0.5)) {
        // Bytes in flight are lost; the other end may see the break before or after other events.
        connection->directions_[Connection::index(side)].flying.clear();
        connection->reset(1 - side, random_.duration(Duration(0), milliseconds(5)));
      }
      connection->close(side);
    }
  }
}

Instant Network::blocked_until(NodeId from, NodeId to) const {
  const auto it = blocked_.find({from, to});
  return it == blocked_.end() ? Instant{} : it->second;
}

void Network::heal() {
  blocked_.clear();
  for (const ConnectionPtr& connection : connections()) {
    for (int side = 0; side < 2; ++side) {
      connection->directions_[Connection::index(side)].stalled_until = {};
      timeline_.after(milliseconds(1), [connection, side] { connection->deliver(side); });
    }
  }
}

std::vector<ConnectionPtr> Network::connections() {
  std::vector<ConnectionPtr> open;
  std::erase_if(connections_, [](const auto& weak) { return weak.expired(); });
  for (const auto& weak : connections_) {
    ConnectionPtr connection = weak.lock();
    if (connection->open(0) && connection->open(1) && !connection->dead_) {
      open.push_back(std::move(connection));
    }
  }
  return open;
}

}  // namespace pccl::simulation
