#include "pccl/node/neighbours.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "pccl/base/clock.h"
#include "pccl/base/fork.h"
#include "pccl/io/pending_connections.h"
#include "pccl/memory/board.h"
#include "pccl/memory/pipe.h"
#include "pccl/os/channel.h"
#include "pccl/os/shared_memory.h"

namespace pccl::node {
namespace {

using Kind = NeighbourPacket::Kind;

constexpr int kBacklog = 1024;
constexpr int kReads = 64;                               // in one turn
constexpr std::size_t kMaxOutgoing = 256;                // packets that a neighbour does not read
constexpr Duration kGreeting = std::chrono::seconds(5);  // until both ends have proved the key
constexpr Duration kTick = std::chrono::milliseconds(100);

int open_channel() { return open_descriptor(os::open_channel); }

memory::Access access_of(memory::Offer offer) {
  return offer == memory::Offer::page ? memory::Access::write : memory::Access::read;
}

bool right_size(memory::Offer offer, std::uint64_t size) {
  if (offer == memory::Offer::board) return size == memory::kBoardBytes;
  if (offer == memory::Offer::page) return size == memory::kPageBytes;
  if (offer == memory::Offer::pipe || offer == memory::Offer::pipe_answer)
    return size == memory::kPipeEndBytes;
  // A region cannot be larger than the host's memory.
  return size > 0 && size <= os::most_shared_memory();
}

// Memory, or descriptors in flight, have run out: worth another try.
bool is_temporary(int error) {
  return error == ETOOMANYREFS || error == ENOBUFS || error == ENOMEM;
}

// Closes a descriptor that came with a packet.
class Passed {
 public:
  explicit Passed(int descriptor) : descriptor_(descriptor) {}
  ~Passed() {
    if (descriptor_ >= 0) close_descriptor(descriptor_);
  }
  Passed(const Passed&) = delete;
  Passed& operator=(const Passed&) = delete;
  [[nodiscard]] int get() const { return descriptor_; }

 private:
  int descriptor_;
};

}  // namespace

Neighbours::Neighbours(asio::io_context& context, const PeerId& self, const HostKey& key,
                       std::uint64_t host, NeighbourEvents events)
    : context_(context),
      self_(self),
      key_(key),
      host_(host),
      events_(std::move(events)),
      acceptor_(
          context,
          {[this](int descriptor) { greet(descriptor); }, [this] { events_.read(); }, {}, {}}),
      timer_(context) {}

Neighbours::~Neighbours() = default;

Status Neighbours::listen() {
  const int descriptor = open_channel();
  if (descriptor < 0) return Status(Code::not_supported, io::error_text(errno));
  if (os::listen_channel(descriptor, channel_name(self_), kBacklog) != 0) {
    const int number = errno;
    close_descriptor(descriptor);
    return Status(Code::not_supported, io::error_text(number));
  }
  acceptor_.start(descriptor);
  return {};
}

// A new connection.
void Neighbours::greet(int descriptor) {
  if (!os::same_user(descriptor)) return close_descriptor(descriptor);
  const Result<std::uint64_t> opened = open(descriptor);
  if (!opened) return;
  const std::uint64_t id = *opened;
  Packet challenge;
  challenge.kind = Kind::challenge;
  challenge.proof = channels_.at(id).challenge = Proof::random();
  push(id, challenge, nullptr);
  if (!channels_.contains(id)) return;
  await(id);
  std::vector<std::uint64_t> unknown;
  for (const auto& [other, channel] : channels_) {
    if (channel.peer.empty()) unknown.push_back(other);
  }
  // Close the oldest: a silent client must not keep others out. One that answered is not silent.
  if (unknown.size() <= io::descriptor_share(io::kMaxPending)) return;
  read(unknown.front());
  const auto oldest = channels_.find(unknown.front());
  if (oldest != channels_.end() && oldest->second.peer.empty()) channels_.erase(oldest);
}

Result<std::uint64_t> Neighbours::open(int descriptor) {
  auto socket = io::Socket::make(context_, descriptor);
  if (!socket) return socket.error();
  const std::uint64_t id = next_++;
  Channel& channel = channels_[id];
  channel.socket = std::move(*socket);
  channel.since = clock_now();
  arm();
  return id;
}

void Neighbours::connect(const PeerId& peer, const HostKey& key) {
  drop(peer);
  const int descriptor = open_channel();
  if (descriptor < 0) return events_.down(peer, io::error_text(errno));
  if (os::connect_channel(descriptor, channel_name(peer)) != 0) {
    const int number = errno;
    close_descriptor(descriptor);
    return events_.down(peer, io::error_text(number));
  }
  if (!os::same_user(descriptor)) {
    close_descriptor(descriptor);
    return events_.down(peer, "it belongs to another user");
  }
  const Result<std::uint64_t> opened = open(descriptor);
  if (!opened) return events_.down(peer, opened.error().reason);
  const std::uint64_t id = *opened;
  Channel& channel = channels_.at(id);
  channel.peer = peer;
  channel.key = key;
  channel.dialled = true;
  by_peer_[peer] = id;
  await(id);
}

// The answer to a challenge.
void Neighbours::say_hello(std::uint64_t id) {
  Channel& channel = channels_.at(id);
  Packet hello;
  hello.kind = Kind::hello;
  hello.host = host_;
  const Proof once = Proof::random();
  std::memcpy(&hello.number, once.bytes.data(), sizeof hello.number);
  hello.from = self_;
  hello.to = channel.peer;
  hello.proof = hello.proven(channel.key, channel.challenge);
  Packet welcome = hello;
  welcome.kind = Kind::welcome;
  channel.welcome = welcome.proven(channel.key, channel.challenge);
  push(id, hello, nullptr);
}

void Neighbours::drop(const PeerId& peer) {
  const auto it = by_peer_.find(peer);
  if (it == by_peer_.end()) return;
  channels_.erase(it->second);
  by_peer_.erase(it);
}

std::uint64_t Neighbours::channel_of(const PeerId& peer) const {
  const auto it = by_peer_.find(peer);
  return it == by_peer_.end() ? 0 : it->second;
}

void Neighbours::offer(const PeerId& peer, memory::Offer what, std::uint64_t number,
                       const memory::RegionPtr& region) {
  const std::uint64_t id = channel_of(peer);
  if (id == 0) return;
  Packet packet;
  packet.kind = region == nullptr ? Kind::forget : Kind::offer;
  packet.offer = static_cast<std::uint64_t>(what);
  packet.number = number;
  packet.size = region == nullptr ? 0 : region->size();
  push(id, packet, region);
}

void Neighbours::ring(const PeerId& peer) {
  const auto it = channels_.find(channel_of(peer));
  if (it == channels_.end() || !it->second.up) return;
  const Packet packet;
  const iovec part{const_cast<Packet*>(&packet), sizeof packet};
  // If its queue is full, other packets wake it.
  (void)it->second.socket->write({&part, 1});
}

void Neighbours::push(std::uint64_t id, const Packet& packet, memory::RegionPtr region) {
  const auto it = channels_.find(id);
  if (it == channels_.end() || it->second.ended) return;
  if (it->second.out.size() >= kMaxOutgoing) return lose(id, "it reads nothing any more");
  it->second.out.push_back({packet, std::move(region)});
  write(id);
}

void Neighbours::write(std::uint64_t id) {
  const auto it = channels_.find(id);
  if (it == channels_.end() || it->second.writing) return;
  Channel& channel = it->second;
  while (!channel.out.empty()) {
    Outgoing& out = channel.out.front();
    const int passed = out.region == nullptr ? -1 : out.region->descriptor();
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&out.packet);
    if (os::send_packet(channel.socket->raw(), {bytes, sizeof out.packet}, passed) >= 0) {
      channel.out.pop_front();
      continue;
    }
    const int number = errno;
    if (number == EINTR) continue;
    if (number == EAGAIN) {
      channel.writing = true;
      channel.socket->wait_writable(
          [this, id, here = std::weak_ptr(here_)](const asio::error_code& error) {
            if (error || here.expired()) return;
            const auto found = channels_.find(id);
            if (found == channels_.end()) return;
            found->second.writing = false;
            write(id);
          });
    } else if (is_temporary(number)) {
      arm();  // the socket stays writable, so only time helps
    } else if (number == EPIPE || number == ECONNRESET) {
      // Its last packets are unread: reading finds the end.
      channel.ended = true;
      channel.out.clear();
    } else {
      lose(id, io::error_text(number));
    }
    return;
  }
}

// Calls tick() soon: a channel has not greeted, or a packet must be written again.
void Neighbours::arm() {
  if (armed_) return;
  armed_ = true;
  timer_.expires_after(kTick);
  timer_.async_wait([this, here = std::weak_ptr(here_)](const asio::error_code& error) {
    if (error || here.expired()) return;
    armed_ = false;
    tick();
    events_.read();
  });
}

void Neighbours::tick() {
  const auto now = clock_now();
  for (const std::uint64_t id : ids()) {
    auto it = channels_.find(id);
    if (it != channels_.end() && !it->second.up && now - it->second.since >= kGreeting) {
      read(id);  // this process may have been late
      it = channels_.find(id);
      if (it != channels_.end() && !it->second.up) lose(id, "no greeting came");
    }
    write(id);
  }
  const bool again = std::any_of(channels_.begin(), channels_.end(), [](const auto& item) {
    return !item.second.up || (!item.second.out.empty() && !item.second.writing);
  });
  if (again) arm();
}

void Neighbours::await(std::uint64_t id) {
  channels_.at(id).socket->wait_readable(
      [this, id, here = std::weak_ptr(here_)](const asio::error_code& error) {
        if (error || here.expired()) return;
        read(id);
        if (channels_.contains(id)) await(id);
        events_.read();
      });
}

void Neighbours::poll() {
  for (const std::uint64_t id : ids()) read(id);
}

std::vector<std::uint64_t> Neighbours::ids() const {
  std::vector<std::uint64_t> all;
  for (const auto& [id, channel] : channels_) all.push_back(id);
  return all;
}

void Neighbours::read(std::uint64_t id) {
  for (int i = 0; i < kReads; ++i) {
    const auto it = channels_.find(id);
    if (it == channels_.end()) return;
    Packet packet;
    ssize_t got = 0;
    int error = 0;
    // One step, so that a fork in between cannot leave unknown descriptors in the child.
    const Passed passed(open_descriptor([&] {
      const os::ReceivedPacket received = os::receive_packet(
          it->second.socket->raw(), {reinterpret_cast<std::uint8_t*>(&packet), sizeof packet});
      error = errno;
      got = received.bytes;
      return received.passed;
    }));
    if (got < 0 && error == EINTR) continue;
    if (got < 0 && error == EAGAIN) return;
    if (got <= 0) return lose(id, got == 0 ? "closed by the other end" : io::error_text(error));
    if (static_cast<std::size_t>(got) != sizeof packet || packet.magic != Packet::kMagic ||
        packet.version != Packet::kVersion) {
      return lose(id, "a malformed packet");
    }
    if (!take(id, packet, passed.get())) return;
  }
}

bool Neighbours::take(std::uint64_t id, const Packet& packet, int descriptor) {
  Channel& channel = channels_.at(id);
  const auto fail = [&](const std::string& reason) {
    lose(id, reason);
    return false;
  };
  if (packet.kind == Kind::challenge) {
    if (!channel.dialled || !channel.challenge.empty() || packet.proof.empty())
      return fail("a challenge out of turn");
    channel.challenge = packet.proof;
    say_hello(id);
    return channels_.contains(id);
  }
  if (packet.kind == Kind::hello) {
    if (!channel.peer.empty() || packet.to != self_ || packet.from.empty())
      return fail("a greeting out of turn");
    if (packet.proof != packet.proven(key_, channel.challenge))
      return fail("it does not know the key of this run");
    if (packet.host != host_) return fail("it counts as another host (PCCL_HOST_ID)");
    if (const std::uint64_t before = channel_of(packet.from); before != 0) channels_.erase(before);
    by_peer_[packet.from] = id;
    channel.peer = packet.from;
    channel.up = true;
    Packet welcome = packet;
    welcome.kind = Kind::welcome;
    welcome.proof = welcome.proven(key_, channel.challenge);
    push(id, welcome, nullptr);
    if (!channels_.contains(id)) return false;
    events_.up(packet.from);
    return channels_.contains(id);
  }
  if (packet.kind == Kind::welcome) {
    if (!channel.dialled || channel.up || channel.challenge.empty())
      return fail("a welcome out of turn");
    if (packet.proof != channel.welcome) return fail("the welcome has a wrong proof");
    channel.up = true;
    events_.up(channel.peer);
    return channels_.contains(id);
  }
  if (!channel.up) return fail("it did not greet");
  if (packet.kind == Kind::ring) return true;
  if (packet.kind == Kind::forget) {
    const auto what = static_cast<memory::Offer>(packet.offer);
    if (what != memory::Offer::array && what != memory::Offer::pipe &&
        what != memory::Offer::pipe_answer)
      return fail("it withdraws memory that is in use");
    events_.offered(channel.peer, what, packet.number, nullptr);
    return channels_.contains(id);
  }
  if (packet.kind != Kind::offer ||
      packet.offer > static_cast<std::uint64_t>(memory::Offer::pipe_answer)) {
    return fail("a malformed packet");
  }
  const auto what = static_cast<memory::Offer>(packet.offer);
  if (!right_size(what, packet.size)) return fail("memory of the wrong size");
  // Without a free descriptor here, an offer comes without its own.
  const auto region = descriptor < 0 ? Error{Code::internal_error, "no free descriptor"}
                                     : memory::map_region(descriptor, packet.size, access_of(what));
  if (region) {
    events_.offered(channel.peer, what, packet.number, *region);
    return channels_.contains(id);
  }
  const std::string& reason = region.error().reason;
  if (region.error().code == Code::refused) return fail(reason);
  // This process has too little of something. Operations need not have arrays and scratch memory.
  events_.unmapped(channel.peer, what, packet.number, reason);
  if (!channels_.contains(id)) return false;
  if (what == memory::Offer::array || what == memory::Offer::scratch) return true;
  return fail("cannot map its memory: " + reason);
}

void Neighbours::lose(std::uint64_t id, const std::string& reason) {
  const auto it = channels_.find(id);
  if (it == channels_.end()) return;
  const PeerId peer = it->second.peer;
  channels_.erase(it);
  const auto known = by_peer_.find(peer);
  if (known == by_peer_.end() || known->second != id) return;
  by_peer_.erase(known);
  events_.down(peer, reason);
}

}  // namespace pccl::node
