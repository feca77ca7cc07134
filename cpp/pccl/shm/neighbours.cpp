#include "pccl/shm/neighbours.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "pccl/net/fork.h"
#include "pccl/shm/board.h"

namespace pccl::shm {
namespace {

constexpr std::uint32_t kMagic = 0x4c4c4350;  // "PCLL"
constexpr std::uint16_t kVersion = 1;
constexpr int kBacklog = 256;
constexpr int kReads = 64;                 // in one turn
constexpr std::size_t kMaxUnknown = 64;    // channels without a hello
constexpr std::size_t kMaxOutgoing = 256;  // offers that a neighbour does not take

enum class Kind : std::uint16_t { hello, welcome, offer, ring };

// Where a peer listens.
std::pair<sockaddr_un, socklen_t> address_of(const PeerId& peer) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "pccl-" + peer.hex();
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero: abstract
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

int open_channel() {
  return net::open_descriptor(
      [] { return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
}

Access access_of(Offer offer) { return offer == Offer::page ? Access::write : Access::read; }

bool right_size(Offer offer, std::uint64_t size) {
  if (offer == Offer::board) return size == kBoardBytes;
  if (offer == Offer::page) return size == kPageBytes;
  return size > 0 && size <= std::uint64_t{1} << 44;
}

}  // namespace

// All that is ever said, as it lies in memory: both ends are one host.
struct Neighbours::Packet {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  Kind kind = Kind::ring;
  std::uint64_t host = 0;
  std::uint64_t number = 0;
  std::uint64_t size = 0;
  std::uint64_t offer = 0;
  PeerId from;
  PeerId to;
  PeerId word;
};

Neighbours::Neighbours(asio::io_context& context, const PeerId& self, const PeerId& word,
                       std::uint64_t host, NeighbourEvents events)
    : context_(context), self_(self), word_(word), host_(host), events_(std::move(events)) {
  static_assert(sizeof(Packet) == sizeof(Outgoing::bytes));
}

Neighbours::~Neighbours() = default;

Status Neighbours::listen() {
  const int descriptor = open_channel();
  if (descriptor < 0) return Status(Code::not_supported, net::error_text(errno));
  const auto [address, size] = address_of(self_);
  if (::bind(descriptor, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::listen(descriptor, kBacklog) != 0) {
    const int number = errno;
    net::close_descriptor(descriptor);
    return Status(Code::not_supported, net::error_text(number));
  }
  listener_ = std::make_unique<net::Socket>(context_, descriptor);
  accept();
  return {};
}

void Neighbours::accept() {
  listener_->wait_readable([this](const asio::error_code& error) {
    if (error) return;
    for (int i = 0; i < kReads; ++i) {
      const int descriptor = net::open_descriptor([&] {
        return ::accept4(listener_->raw(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      });
      if (descriptor < 0) break;
      std::size_t unknown = 0;
      for (const auto& [id, channel] : channels_) unknown += channel.peer.empty() ? 1 : 0;
      if (unknown >= kMaxUnknown) {
        net::close_descriptor(descriptor);
        continue;
      }
      const std::uint64_t id = next_++;
      channels_[id].socket = std::make_unique<net::Socket>(context_, descriptor);
      await(id);
    }
    accept();
  });
}

void Neighbours::connect(const PeerId& peer, const PeerId& word) {
  drop(peer);
  const int descriptor = open_channel();
  if (descriptor < 0) return events_.down(peer, net::error_text(errno));
  const auto [address, size] = address_of(peer);
  if (::connect(descriptor, reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    const int number = errno;
    net::close_descriptor(descriptor);
    return events_.down(peer, net::error_text(number));
  }
  const std::uint64_t id = next_++;
  Channel& channel = channels_[id];
  channel.socket = std::make_unique<net::Socket>(context_, descriptor);
  channel.peer = peer;
  channel.dialled = true;
  by_peer_[peer] = id;
  Packet hello;
  hello.kind = Kind::hello;
  hello.host = host_;
  hello.from = self_;
  hello.to = peer;
  hello.word = word;
  push(id, hello, nullptr);
  await(id);
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

void Neighbours::offer(const PeerId& peer, Offer what, std::uint64_t number,
                       const RegionPtr& region) {
  const std::uint64_t id = channel_of(peer);
  if (id == 0) return;
  Packet packet;
  packet.kind = Kind::offer;
  packet.offer = static_cast<std::uint64_t>(what);
  packet.number = number;
  packet.size = region->size();
  push(id, packet, region);
}

void Neighbours::ring(const PeerId& peer) {
  const auto it = channels_.find(channel_of(peer));
  if (it == channels_.end() || !it->second.out.empty()) return;  // what is under way wakes it too
  const Packet packet;
  const iovec part{const_cast<Packet*>(&packet), sizeof packet};
  // When its queue is full it has enough to wake up for.
  (void)it->second.socket->write({&part, 1});
}

void Neighbours::push(std::uint64_t id, const Packet& packet, RegionPtr region) {
  const auto it = channels_.find(id);
  if (it == channels_.end()) return;
  if (it->second.out.size() >= kMaxOutgoing) return lose(id, "it takes nothing any more");
  Outgoing& out = it->second.out.emplace_back();
  std::memcpy(out.bytes.data(), &packet, sizeof packet);
  out.region = std::move(region);
  write(id);
}

void Neighbours::write(std::uint64_t id) {
  const auto it = channels_.find(id);
  if (it == channels_.end() || it->second.writing) return;
  Channel& channel = it->second;
  while (!channel.out.empty()) {
    Outgoing& out = channel.out.front();
    iovec part{out.bytes.data(), out.bytes.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (out.region != nullptr) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      const int descriptor = out.region->descriptor();
      std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    }
    const ssize_t put = ::sendmsg(channel.socket->raw(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && (errno == EAGAIN || errno == ETOOMANYREFS)) {
      channel.writing = true;
      channel.socket->wait_writable([this, id](const asio::error_code& error) {
        const auto found = channels_.find(id);
        if (error || found == channels_.end()) return;
        found->second.writing = false;
        write(id);
      });
      return;
    }
    if (put < 0) return;  // reading finds the end
    channel.out.pop_front();
  }
}

void Neighbours::await(std::uint64_t id) {
  channels_.at(id).socket->wait_readable([this, id](const asio::error_code& error) {
    if (error) return;
    read(id);
    if (channels_.contains(id)) await(id);
    events_.read();
  });
}

void Neighbours::poll() {
  std::vector<std::uint64_t> ids;
  for (const auto& [id, channel] : channels_) ids.push_back(id);
  for (const std::uint64_t id : ids) read(id);
}

void Neighbours::read(std::uint64_t id) {
  for (int i = 0; i < kReads; ++i) {
    const auto it = channels_.find(id);
    if (it == channels_.end()) return;
    Packet packet;
    iovec part{&packet, sizeof packet};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(4 * sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    ssize_t got = 0;
    int error = 0;
    // As one step: a fork in between would leave the child with descriptors that nobody knows of.
    const int descriptor = net::open_descriptor([&]() -> int {
      got = ::recvmsg(it->second.socket->raw(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
      error = errno;
      int first = -1;
      if (got <= 0) return first;
      for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
           header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t k = 0; k < count; ++k) {
          int one = -1;
          std::memcpy(&one, CMSG_DATA(header) + k * sizeof(int), sizeof one);
          if (first < 0) {
            first = one;
          } else {
            ::close(one);
          }
        }
      }
      return first;
    });
    if (got < 0 && error == EINTR) continue;
    if (got < 0 && error == EAGAIN) return;
    if (got <= 0) return lose(id, got == 0 ? "closed by the other end" : net::error_text(error));
    if (static_cast<std::size_t>(got) != sizeof packet || packet.magic != kMagic ||
        packet.version != kVersion) {
      if (descriptor >= 0) net::close_descriptor(descriptor);
      return lose(id, "a malformed packet");
    }
    if (!take(id, packet, descriptor)) return;
  }
}

bool Neighbours::take(std::uint64_t id, const Packet& packet, int descriptor) {
  Channel& channel = channels_.at(id);
  const auto fail = [&](const char* reason) {
    if (descriptor >= 0) net::close_descriptor(descriptor);
    lose(id, reason);
    return false;
  };
  if (packet.kind == Kind::hello) {
    if (!channel.peer.empty() || packet.to != self_ || packet.from.empty())
      return fail("a greeting out of turn");
    if (packet.word != word_) return fail("a stranger");
    if (packet.host != host_) return fail("it is to count as another host (PCCL_HOST_ID)");
    if (const std::uint64_t before = channel_of(packet.from); before != 0) channels_.erase(before);
    by_peer_[packet.from] = id;
    channel.peer = packet.from;
    channel.up = true;
    Packet welcome;
    welcome.kind = Kind::welcome;
    push(id, welcome, nullptr);
    events_.up(packet.from);
    return channels_.contains(id);
  }
  if (packet.kind == Kind::welcome) {
    if (!channel.dialled || channel.up) return fail("a welcome out of turn");
    channel.up = true;
    events_.up(channel.peer);
    return channels_.contains(id);
  }
  if (!channel.up) return fail("it did not greet");
  if (packet.kind == Kind::ring) return true;
  if (packet.kind != Kind::offer || descriptor < 0 ||
      packet.offer > static_cast<std::uint64_t>(Offer::scratch)) {
    return fail("an offer of nothing");
  }
  const auto what = static_cast<Offer>(packet.offer);
  if (!right_size(what, packet.size)) return fail("memory of the wrong size");
  const auto region = map_region(descriptor, packet.size, access_of(what));
  net::close_descriptor(descriptor);
  if (!region) {
    lose(id, "cannot map its memory: " + region.error().reason);
    return false;
  }
  events_.offered(channel.peer, what, packet.number, *region);
  return channels_.contains(id);
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

}  // namespace pccl::shm
