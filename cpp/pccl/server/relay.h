// Connections between two peers that go through the master: what comes on one socket goes out on
// the other, unread. Beside server.cpp the only file here with I/O.
//
// Each end of a connection has a token of its own, which the master has told it on its control
// connection: random, good once and for a few seconds. Nothing else is known of who comes, and
// nothing else is needed: with a secret the two peers shake hands through us, end to end.
//
// A direction holds what its receiver does not take: at most kHeldBytes, then nothing more is read.
#pragma once

#include <array>
#include <asio/io_context.hpp>
#include <asio/steady_timer.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/io/socket.h"

namespace pccl::server {

// *one thread: the server's*
class Relays {
 public:
  static constexpr std::size_t kHeldBytes = 128 << 10;
  // Tokens that were told and did not come both yet; connections that are up.
  static constexpr std::size_t kMostExpected = 1024;
  static constexpr std::size_t kMostOpen = 512;
  static constexpr std::size_t kMostOfPair = 8;  // of both kinds
  // A connection of which an end has taken nothing for so long is closed, though there was some.
  static constexpr Duration kStuck = std::chrono::seconds(30);
  static constexpr Duration kTokenTime = std::chrono::seconds(5);

  // `rate`: bytes per second, all together; 0: no limit. `most_open`: connections, at most
  // kMostOpen.
  Relays(asio::io_context& context, std::uint64_t rate, std::size_t most_open);
  ~Relays() { stop(); }
  Relays(const Relays&) = delete;
  Relays& operator=(const Relays&) = delete;

  void expect(const PeerId& one, const PeerId& other, const PeerId& token_of_one,
              const PeerId& token_of_other, Instant now);
  // Somebody came with it. False, and the connection is closed: nobody is expected with it, or too
  // many are open.
  bool enter(const PeerId& token, std::unique_ptr<io::Socket> socket, Instant now);
  // No more between these two.
  void end(const PeerId& one, const PeerId& other, Instant now);
  // Forgets who has not come in time, and ends what does not move.
  void on_time(Instant now);
  void stop();

 private:
  using Pair = std::pair<PeerId, PeerId>;  // the smaller one first
  struct Meeting {
    Pair pair;
    std::array<PeerId, 2> tokens;
    std::array<std::unique_ptr<io::Socket>, 2> sockets;
    Instant until{};
  };
  struct Direction {
    std::vector<std::uint8_t> held;
    std::size_t held_at = 0;
    bool waits = false;                  // for its socket, or for its turn
    bool ended = false;                  // nothing more comes
    std::optional<Instant> stuck_since;  // its receiver has taken nothing since
  };
  struct Open {
    Pair pair;
    std::array<std::unique_ptr<io::Socket>, 2> sockets;
    std::array<Direction, 2> directions;  // [i]: from socket i
  };
  // What is shown of a pair when its last connection has ended.
  struct Tally {
    std::size_t open = 0;
    std::uint64_t bytes = 0;
    Instant since{};
  };

  static Pair ordered(const PeerId& one, const PeerId& other) { return std::minmax(one, other); }
  void begin(Meeting meeting, Instant now);
  // Moves bytes of that direction. An exception costs that connection alone.
  void turn(std::uint64_t id, std::size_t from);
  void pump(std::uint64_t id, std::size_t from);
  bool push(Open& open, std::size_t from);
  // Of these two, connected or expected.
  [[nodiscard]] std::size_t count_of(const Pair& pair) const;
  // Descriptors' worth of connections: those that are up, and ends that wait for the other one.
  [[nodiscard]] std::size_t taken() const;
  void close(std::uint64_t id);
  void forget(std::uint64_t meeting);
  [[nodiscard]] std::size_t allowed(std::size_t wanted);
  void wait_for_allowance(std::uint64_t id, std::size_t from);

  asio::io_context& context_;
  const std::uint64_t rate_;
  const std::size_t most_open_;
  std::map<PeerId, std::uint64_t> tokens_;     // meetings
  std::map<std::uint64_t, Meeting> meetings_;  // the oldest first
  std::map<std::uint64_t, Open> open_;
  std::map<Pair, Tally> tallies_;
  std::uint64_t next_ = 1;
  std::vector<std::uint8_t> scratch_;
  // of the rate
  asio::steady_timer refill_;
  double allowance_ = 0;
  Instant filled_{};
  std::vector<std::pair<std::uint64_t, std::size_t>> starved_;  // who waits, in their order
  std::optional<double> share_;                                 // of who has its turn
};

}  // namespace pccl::server
