// A fake network and a simulated clock: one thread, one seed, no sockets. Connections are byte
// streams that delay, cut up, hold back and lose bytes the way TCP connections do.
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

// What happens when. Things due at the same instant happen in the order in which they were planned.
class Timeline {
 public:
  [[nodiscard]] Instant now() const { return now_; }
  [[nodiscard]] std::uint64_t events() const { return events_; }
  void at(Instant when, std::function<void()> what);
  void after(Duration delay, std::function<void()> what) { at(now_ + delay, std::move(what)); }
  // Lets the next thing happen; false when nothing is planned.
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
  Instant now_{
      std::chrono::seconds(1000)};  // well above zero, like a machine that has been up for a while
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
  // It goes through the master.
  [[nodiscard]] bool relayed() const { return relayed_; }
  // Between neighbours, as if through memory.
  [[nodiscard]] bool memory() const { return memory_; }
  [[nodiscard]] bool open(int side) const { return sides_[index(side)].open; }
  // Called whenever this side may read, write, or has to close.
  void on_ready(int side, std::function<void()> ready) {
    sides_[index(side)].ready = std::move(ready);
  }

  [[nodiscard]] std::size_t room(int side) const;  // bytes that may be written now
  void write(int side, wire::Bytes bytes);
  [[nodiscard]] std::span<const std::uint8_t> readable(int side) const;
  void consume(int side, std::size_t bytes);
  // Everything that will ever come has been read.
  [[nodiscard]] bool ended(int side) const;
  void close(int side);

  // -- faults
  // Both ends learn of it at different times; `half_open`: this side never does.
  void cut(int half_open = -1);
  void stall(int direction, Instant until) { directions_[index(direction)].stalled_until = until; }
  [[nodiscard]] bool quiet() const;  // nothing under way in either direction

 private:
  friend class Network;
  struct Packet {
    Instant due;
    wire::Bytes bytes;
    bool last = false;
  };
  // What one side writes.
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
  bool dead_ = false;  // cut: nothing gets through any more
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
  // Only nodes behind the same NAT reach it; 0: all do.
  void hide(NodeId node, std::uint32_t nat) { nats_[node] = nat; }
  [[nodiscard]] std::uint32_t nat_of(NodeId node) const {
    const auto it = nats_.find(node);
    return it == nats_.end() ? 0 : it->second;
  }
  // `done` gets the connection, or null when it did not come about.
  // What goes through memory between these two ends.
  void sever(NodeId one, NodeId other);
  void dial(NodeId from, NodeId to, std::size_t capacity, std::function<void(ConnectionPtr)> done,
            bool memory = false);
  // Between two that have both dialled the master; the first is as who has dialled.
  ConnectionPtr relay(NodeId one, NodeId other, std::size_t capacity);
  // The node's process ends: nobody listens, and the other ends of its connections learn of it.
  void kill(NodeId node);
  // Bytes from `from` to `to` wait until `until`.
  void block(NodeId from, NodeId to, Instant until) { blocked_[{from, to}] = until; }
  [[nodiscard]] Instant blocked_until(NodeId from, NodeId to) const;
  void heal();
  [[nodiscard]] std::vector<ConnectionPtr> connections();  // open on both sides

  // How long one write takes to arrive.
  Duration slowness{std::chrono::microseconds(200)};
  double chatter = 0.2;  // how often bytes are read and written in small pieces

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
