// Connections between two peers through the master: bytes that arrive on one socket are written to
// the other, uninterpreted.
//
// Each end of a connection identifies itself by its own token, which the master sends on the
// control connection. A token is random, and valid once and for a few seconds. The relay knows
// nothing else of its clients. With a secret, the two peers run their TLS handshake end to end
// through the relay.
//
// A direction buffers up to kHeldBytes that its receiver does not read. Then it stops reading.
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
#include "pccl/io/write_queue.h"

namespace pccl::server {

// *one thread: the server's*
class Relays {
 public:
  static constexpr std::size_t kHeldBytes = 128 << 10;
  static constexpr std::size_t kMostExpected = 1024;  // connections without both ends
  static constexpr std::size_t kMostOpen = 512;       // connections
  static constexpr std::size_t kMostOfPair = 8;       // of both kinds, between two peers
  // A connection is closed if one end has bytes to read and reads none for this long.
  static constexpr Duration kStuck = std::chrono::seconds(30);
  static constexpr Duration kTokenTime = std::chrono::seconds(5);

  // `rate`: bytes per second of all connections together; 0: no limit. `most_open`: limit on open
  // connections, at most kMostOpen.
  Relays(asio::io_context& context, std::uint64_t rate, std::size_t most_open);
  ~Relays() { stop(); }
  Relays(const Relays&) = delete;
  Relays& operator=(const Relays&) = delete;

  // `names`: of the peers, for the log: "one and other".
  void expect(const PeerId& one, const PeerId& other, const RelayToken& token_of_one,
              const RelayToken& token_of_other, Instant now, const std::string& names = {});
  // Takes over the connection that sent this token. False: the token is not expected, or too many
  // connections are open. The connection is closed then.
  bool enter(const RelayToken& token, std::unique_ptr<io::Socket> socket, Instant now);
  // Closes all connections between these two peers, and forgets their tokens.
  void end(const PeerId& one, const PeerId& other);
  // Forgets expired tokens, and closes stuck connections.
  void on_time(Instant now);
  void stop();

 private:
  using Pair = std::pair<PeerId, PeerId>;  // the smaller one first
  struct Expected {
    Pair pair;
    std::array<RelayToken, 2> tokens;
    std::string names;
    std::array<std::unique_ptr<io::Socket>, 2> sockets;
    Instant until{};
  };
  struct Direction {
    io::WriteQueue held{0};
    bool waits = false;                  // for a socket, for its turn, or for the rate limit
    bool ended = false;                  // the sender has closed
    std::optional<Instant> stuck_since;  // the receiver has read nothing since
  };
  struct Open {
    Pair pair;
    std::array<std::unique_ptr<io::Socket>, 2> sockets;
    std::array<Direction, 2> directions;  // [i]: from socket i
  };
  // Logged when the last connection of a pair has ended.
  struct Tally {
    std::size_t open = 0;
    std::uint64_t bytes = 0;
    Instant since{};
    std::string names;
  };

  static Pair ordered(const PeerId& one, const PeerId& other) { return std::minmax(one, other); }
  void begin(Expected meeting, Instant now);
  // Moves bytes of one direction. An exception closes this connection and no other.
  void turn(std::uint64_t id, std::size_t from);
  void pump(std::uint64_t id, std::size_t from);
  // Connections of this pair, open or expected.
  [[nodiscard]] std::size_t count_of(const Pair& pair) const;
  // The number of connections that hold descriptors: open ones, and those with one end connected.
  [[nodiscard]] std::size_t taken() const;
  void close(std::uint64_t id);
  void forget(std::uint64_t id);
  [[nodiscard]] std::size_t allowed(std::size_t wanted);
  void wait_for_allowance(std::uint64_t id, std::size_t from);

  asio::io_context& context_;
  const std::uint64_t rate_;
  const std::size_t most_open_;
  std::map<RelayToken, std::uint64_t> tokens_;  // ids in expected_
  std::map<std::uint64_t, Expected> expected_;  // the oldest first
  std::map<std::uint64_t, Open> open_;
  std::map<Pair, Tally> tallies_;
  std::uint64_t next_ = 1;
  std::vector<std::uint8_t> scratch_;
  // -- the rate limit
  asio::steady_timer refill_;
  double allowance_ = 0;
  Instant filled_{};
  std::vector<std::pair<std::uint64_t, std::size_t>> starved_;  // directions that wait, in order
  std::optional<double> share_;  // bytes for the direction that has its turn
};

}  // namespace pccl::server
