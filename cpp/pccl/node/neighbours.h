// Peers on this host: found by a proof, not by an address, and given what they may map. A socket in
// the abstract namespace, which ends at the borders of a network namespace: whoever can connect to
// it as the same user, and knows the word that only members of the run are told, is on this host.
// Both ends prove that they know it, each to a number of the other's, so that what was said once is
// of no use again; before that nothing is passed on.
#pragma once

#include <array>
#include <asio/io_context.hpp>
#include <asio/steady_timer.hpp>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/io/socket.h"
#include "pccl/memory/offer.h"
#include "pccl/memory/region.h"

namespace pccl::node {

// What comes of neighbours. Called from the loop, or from inside connect and poll.
struct NeighbourEvents {
  std::function<void(const PeerId&)> up;
  std::function<void(const PeerId&, const std::string& reason)> down;  // or never was up
  std::function<void(const PeerId&, memory::Offer, std::uint64_t number, const memory::RegionPtr&)>
      offered;
  std::function<void()> read;  // what came on the loop was told, and whoever was rung is awake
};

// *one thread at a time: whoever drives the loop*
class Neighbours {
 public:
  // `word`: what others must know to be let in. `host`: names this host; equal on all its peers.
  Neighbours(asio::io_context& context, const PeerId& self, const PeerId& word, std::uint64_t host,
             NeighbourEvents events);
  ~Neighbours();
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;

  Status listen();
  // Ends in `up` or `down`, within seconds.
  void connect(const PeerId& peer, const PeerId& word);
  // Without a `down`.
  void drop(const PeerId& peer);
  // Ignored when the peer is not there (any more). Null: what was offered is of no use any more.
  void offer(const PeerId& peer, memory::Offer what, std::uint64_t number,
             const memory::RegionPtr& region);
  void ring(const PeerId& peer);
  // Takes what has come and was not read yet.
  void poll();

 private:
  struct Packet;
  struct Outgoing {
    std::array<std::uint8_t, 88> bytes{};
    memory::RegionPtr region;
  };
  struct Channel {
    std::unique_ptr<io::Socket> socket;
    PeerId peer;       // zero until its hello
    PeerId word;       // dialled: what both prove to know
    PeerId challenge;  // the listener's number: sent, or zero until it comes
    PeerId welcome;    // dialled: the proof that its answer must have
    std::chrono::steady_clock::time_point since{};
    bool dialled = false;
    bool up = false;
    bool writing = false;
    bool ended = false;  // by the other end; what it said before is read
    std::deque<Outgoing> out;
  };

  void accept();
  void greet(int descriptor);
  std::uint64_t open(int descriptor);
  void arm();
  void tick();
  void await(std::uint64_t id);
  void read(std::uint64_t id);
  bool take(std::uint64_t id, const Packet& packet, int descriptor);  // false: the channel is gone
  void say_hello(std::uint64_t id);
  void push(std::uint64_t id, const Packet& packet, memory::RegionPtr region);
  void write(std::uint64_t id);
  void lose(std::uint64_t id, const std::string& reason);
  [[nodiscard]] std::vector<std::uint64_t> ids() const;
  [[nodiscard]] std::uint64_t channel_of(const PeerId& peer) const;  // 0: none

  asio::io_context& context_;
  PeerId self_;
  PeerId word_;
  std::uint64_t host_;
  NeighbourEvents events_;
  std::unique_ptr<io::Socket> listener_;
  std::map<std::uint64_t, Channel> channels_;
  std::map<PeerId, std::uint64_t> by_peer_;
  std::uint64_t next_ = 1;
  bool armed_ = false;
  asio::steady_timer timer_;
  asio::steady_timer accept_again_;
  // Handlers that were due already may still run when this object is gone.
  std::shared_ptr<const bool> here_ = std::make_shared<const bool>(true);
};

}  // namespace pccl::node
