// Finds the peers of this host, and passes memory to and from them. A peer proves that it is on
// this host; its address proves nothing. The socket is in the abstract namespace, which ends at the
// borders of a network namespace: a process that connects to it as the same user, and knows the key
// that only members of the run have, is on this host. Each end proves that it knows the key, with a
// number chosen by the other end, so a recorded proof is useless. Nothing else is sent before.
#pragma once

#include <asio/io_context.hpp>
#include <asio/steady_timer.hpp>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/io/acceptor.h"
#include "pccl/io/socket.h"
#include "pccl/memory/offer.h"
#include "pccl/memory/region.h"
#include "pccl/node/neighbour_packet.h"

namespace pccl::node {

// Called from the loop, or from inside connect and poll.
struct NeighbourEvents {
  std::function<void(const PeerId&)> up;
  std::function<void(const PeerId&, const std::string& reason)> down;  // or never came up
  std::function<void(const PeerId&, memory::Offer, std::uint64_t number, const memory::RegionPtr&)>
      offered;
  // The peer offered memory that cannot be mapped here. Followed by `down`, except for an array or
  // scratch memory.
  std::function<void(const PeerId&, memory::Offer, std::uint64_t number, const std::string& reason)>
      unmapped;
  std::function<void()> read;  // after the others, in each turn of the loop
};

// *one thread at a time: whoever drives the loop*
class Neighbours {
 public:
  // `key`: others must know it. `host`: names this host; all its peers have the same.
  Neighbours(asio::io_context& context, const PeerId& self, const HostKey& key, std::uint64_t host,
             NeighbourEvents events);
  ~Neighbours();
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;

  Status listen();
  // Leads to `up` or `down`, within seconds.
  void connect(const PeerId& peer, const HostKey& key);
  // Does not call `down`.
  void drop(const PeerId& peer);
  // Ignored if the peer is not connected. A null region withdraws an earlier offer.
  void offer(const PeerId& peer, memory::Offer what, std::uint64_t number,
             const memory::RegionPtr& region);
  void ring(const PeerId& peer);
  // Reads what has come.
  void poll();

 private:
  using Packet = NeighbourPacket;
  struct Outgoing {
    Packet packet;
    memory::RegionPtr region;
  };
  struct Channel {
    std::unique_ptr<io::Socket> socket;
    PeerId peer;      // zero until its hello
    HostKey key;      // dialled: the key that both ends prove to know
    Proof challenge;  // the listener's number: sent, or zero until it comes
    Proof welcome;    // dialled: the proof that the answer must have
    Instant since{};
    bool dialled = false;
    bool up = false;
    bool writing = false;
    bool ended = false;  // closed by the other end; what it sent before is still read
    std::deque<Outgoing> out;
  };

  void greet(int descriptor);
  [[nodiscard]] Result<std::uint64_t> open(int descriptor);
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
  HostKey key_;
  std::uint64_t host_;
  NeighbourEvents events_;
  io::Acceptor acceptor_;
  std::map<std::uint64_t, Channel> channels_;
  std::map<PeerId, std::uint64_t> by_peer_;
  std::uint64_t next_ = 1;
  bool armed_ = false;
  asio::steady_timer timer_;
  // Expires with this object: a handler that is already due may run after its end.
  std::shared_ptr<const bool> here_ = std::make_shared<const bool>(true);
};

}  // namespace pccl::node
