// A simulated network and clock: one thread, one seed, no sockets. Connections are byte streams
// that delay, fragment, hold back and lose bytes as TCP connections do.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <span>
#include <utility>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/wire/codec.h"

namespace pccl::simulation {

// Repeatable random numbers (splitmix64), equal on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next();
  std::uint64_t below(std::uint64_t bound) { return bound < 2 ? 0 : next() % bound; }
  std::uint64_t between(std::uint64_t least, std::uint64_t most) {
    return least + below(most - least + 1);
  }
  bool chance(double probability) {
    return static_cast<double>(next() >> 11) * 0x1.0p-53 < probability;
  }
  Duration duration(Duration least, Duration most) {
    return least + Duration(static_cast<std::int64_t>(
                       below(static_cast<std::uint64_t>((most - least).count()) + 1)));
  }

 private:
  std::uint64_t state_;
};

// The events to come. Events due at the same instant happen in the order in which they were
// planned.
class Timeline {
 public:
  [[nodiscard]] Instant now() const { return now_; }
  [[nodiscard]] std::uint64_t events() const { return events_; }
  void at(Instant when, std::function<void()> what);
  void after(Duration delay, std::function<void()> what) { at(now_ + delay, std::move(what)); }
  // Runs the next event. False: nothing is planned.
  bool step();

 private:
  struct Event {
    Instant when;
    std::uint64_t number;
    std::function<void()> what;
    bool operator<(const Event& other) const {
      return std::pair(when, number) > std::pair(other.when, other.number);
    }
  };
  std::priority_queue<Event> events_due_;
  Instant now_{std::chrono::seconds(1000)};  // well above zero, as on a real machine
  std::uint64_t planned_ = 0;
  std::uint64_t events_ = 0;
};

using NodeId = std::uint32_t;
inline constexpr NodeId kMasterNode = 0;
inline constexpr NodeId kNowhere = 0xffffffff;  // an address at which nothing listens

class Network;

// One connection. Side 0 dialled, side 1 listened.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Network& network, NodeId dialler, NodeId listener, std::size_t capacity, bool local);

  [[nodiscard]] NodeId node(int side) const { return sides_[index(side)].node; }
  [[nodiscard]] bool local() const { return local_; }
  // Whether the master relays it.
  [[nodiscard]] bool relayed() const { return relayed_; }
  // Whether it represents shared memory between neighbours.
  [[nodiscard]] bool memory() const { return memory_; }
  // 0: not known of a relayed one, and of memory.
  [[nodiscard]] Duration round_trip() const {
    return relayed_ || memory_ ? Duration{} : directions_[0].latency + directions_[1].latency;
  }
  [[nodiscard]] bool open(int side) const { return sides_[index(side)].open; }
  // `ready` is called whenever this side can read or write, or must close.
  void on_ready(int side, std::function<void()> ready) {
    sides_[index(side)].ready = std::move(ready);
  }

  [[nodiscard]] std::size_t room(int side) const;  // bytes that may be written now
  void write(int side, wire::Bytes bytes);
  [[nodiscard]] std::span<const std::uint8_t> readable(int side) const;
  void consume(int side, std::size_t bytes);
  // Whether all bytes were read and the other side has closed.
  [[nodiscard]] bool ended(int side) const;
  void close(int side);

  // -- faults
  // Cuts the connection. Both ends learn of it at different times; side `half_open` never does.
  void cut(int half_open = -1);
  void stall(int direction, Instant until) { directions_[index(direction)].stalled_until = until; }
  [[nodiscard]] bool quiet() const;  // no byte in flight in either direction

 private:
  friend class Network;
  struct Packet {
    Instant due;
    wire::Bytes bytes;
    bool last = false;
  };
  // The bytes that one side writes.
  struct Direction {
    std::deque<Packet> flying;
    wire::Bytes arrived;
    std::size_t read = 0;  // of arrived
    std::size_t used = 0;  // bytes flying or arrived and not read
    Instant last_due{};
    Instant stalled_until{};
    Duration latency{};
    bool finished = false;
  };
  struct Side {
    NodeId node = 0;
    bool open = true;
    bool broken = false;
    std::function<void()> ready;
  };
  static std::size_t index(int side) { return static_cast<std::size_t>(side); }
  void send(int side, wire::Bytes bytes, bool last);
  void deliver(int direction);
  void notify(int side);
  void reset(int side, Duration delay);

  Network& network_;
  std::size_t capacity_;
  bool local_;
  bool memory_ = false;
  bool relayed_ = false;
  bool dead_ = false;  // cut: no further bytes arrive
  std::array<Side, 2> sides_;
  std::array<Direction, 2> directions_;
};
using ConnectionPtr = std::shared_ptr<Connection>;

class Network {
 public:
  Network(Timeline& timeline, Random& random) : timeline_(timeline), random_(random) {}

  using Accept = std::function<void(ConnectionPtr)>;
  void listen(NodeId node, Accept accept) { listeners_[node] = std::move(accept); }
  void stop_listening(NodeId node) { listeners_.erase(node); }
  // Only nodes behind the same NAT can reach the node. 0: all can.
  void hide(NodeId node, std::uint32_t nat) { nats_[node] = nat; }
  [[nodiscard]] std::uint32_t nat_of(NodeId node) const {
    const auto it = nats_.find(node);
    return it == nats_.end() ? 0 : it->second;
  }
  // Cuts the memory connections between two nodes.
  void sever(NodeId one, NodeId other);
  // `done` gets the connection, or null if it failed.
  void dial(NodeId from, NodeId to, std::size_t capacity, std::function<void(ConnectionPtr)> done,
            bool memory = false);
  // Connects two nodes that have both dialled the master. `one` is the dialling side.
  ConnectionPtr relay(NodeId one, NodeId other, std::size_t capacity);
  // Ends the node's process: it stops listening, and the other ends of its connections see them
  // end.
  void kill(NodeId node);
  // Delays bytes from `from` to `to` until `until`.
  void block(NodeId from, NodeId to, Instant until) { blocked_[{from, to}] = until; }
  [[nodiscard]] Instant blocked_until(NodeId from, NodeId to) const;
  void heal();
  [[nodiscard]] std::vector<ConnectionPtr> connections();  // open on both sides

  // The time that one write takes to arrive.
  Duration slowness{std::chrono::microseconds(200)};
  double chatter = 0.2;  // probability that bytes are read and written in small pieces

 private:
  friend class Connection;
  Timeline& timeline_;
  Random& random_;
  std::map<NodeId, Accept> listeners_;
  std::map<NodeId, std::uint32_t> nats_;
  std::map<std::pair<NodeId, NodeId>, Instant> blocked_;
  std::vector<std::weak_ptr<Connection>> connections_;
};

}  // namespace pccl::simulation
