// The protocol of neighbours on one host, over a real socket: packets from a peer that knows the
// key or not, with valid or invalid memory.
#include "pccl/node/neighbours.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <asio/io_context.hpp>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "fuzz.h"
#include "pccl/memory/board.h"
#include "pccl/memory/pipe.h"
#include "pccl/node/neighbour_packet.h"
#include "pccl/os/channel.h"

namespace pccl::fuzz {
namespace {

using Packet = node::NeighbourPacket;
using Bytes = std::array<std::uint8_t, sizeof(Packet) + 8>;  // room for one that is too long

class World {
 public:
  World()
      : neighbours_(
            context_, self_, word_, 0,
            {[this](const PeerId& id) { up_ = id; }, [](const PeerId&, const std::string&) {},
             [](const PeerId&, memory::Offer, std::uint64_t, const memory::RegionPtr& region) {
               if (region == nullptr || region->size() == 0) return;
               // All mapped memory must be accessible.
               volatile std::uint8_t last = region->data()[region->size() - 1];
               (void)last;
             },
             [](const PeerId&, memory::Offer, std::uint64_t, const std::string&) {}, [] {}}) {
    must(static_cast<bool>(neighbours_.listen()), "it can listen");
    connect();
  }
  ~World() { ::close(descriptor_); }

  void step(Script& script) {
    const std::uint8_t what = script.byte();
    const bool fresh = std::exchange(fresh_, false);
    bool valid = false;  // a hello that must be accepted
    if (what % 8 == 0) {
      ::close(descriptor_);
      connect();
    } else if (what % 8 == 1) {
      neighbours_.offer(other_, memory::Offer::array, script.byte(), nullptr);
      neighbours_.ring(other_);
    } else {
      const std::uint8_t flags = script.byte();
      Bytes packet{};
      const auto given = script.piece();
      std::copy_n(given.begin(), std::min(given.size(), packet.size()), packet.begin());
      if ((flags & 1) == 0) greet(packet, flags);
      send(packet.data(), (flags & 2) != 0 ? std::min(given.size(), packet.size()) : sizeof(Packet),
           flags >> 4);
      valid = fresh && (flags & 7) == 0;
    }
    turn();
    must(!valid || up_ == other_, "a valid hello is accepted");
  }

 private:
  // A new connection, with the challenge that comes first.
  void connect() {
    descriptor_ = os::open_channel();
    must(descriptor_ >= 0 && os::connect_channel(descriptor_, node::channel_name(self_)) == 0,
         "it listens");
    challenge_ = {};
    up_ = {};
    turn();
    must(!challenge_.empty(), "it sends a challenge");
    fresh_ = true;
  }

  void turn() {
    context_.restart();
    context_.poll();
    neighbours_.poll();
    Packet answer;
    while (::recv(descriptor_, &answer, sizeof answer, MSG_DONTWAIT) > 0) {
      if (answer.kind == Packet::Kind::challenge) challenge_ = answer.proof;
    }
  }

  // Makes it a valid packet; a hello unless bit 2 of `flags` is set.
  void greet(Bytes& bytes, std::uint8_t flags) const {
    Packet packet;
    std::memcpy(&packet, bytes.data(), sizeof packet);
    packet.magic = Packet::kMagic;
    packet.version = Packet::kVersion;
    packet.kind = static_cast<Packet::Kind>(static_cast<std::uint8_t>(packet.kind) % 6);
    if ((flags & 4) == 0) {
      packet.kind = Packet::Kind::hello;
      packet.host = 0;
      packet.from = other_;
      packet.to = self_;
      packet.proof = packet.proven(word_, challenge_);
    }
    std::memcpy(bytes.data(), &packet, sizeof packet);
  }

  // Sends the packet. `how` selects the number, size and seals of the descriptors that it passes.
  void send(const void* data, std::size_t size, unsigned how) const {
    std::vector<int> passed;
    if ((how & 3) != 0) {
      const std::size_t sizes[] = {memory::kBoardBytes, memory::kPageBytes, memory::kPipeEndBytes,
                                   4096};
      const int memory = ::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
      must(memory >= 0, "memory");
      must(::ftruncate(memory, static_cast<off_t>(sizes[how >> 2 & 3])) == 0, "memory");
      int seals = (how & 3) == 1 ? 0 : F_SEAL_SHRINK | F_SEAL_GROW;
      if ((how & 3) == 3) seals |= F_SEAL_FUTURE_WRITE;
      if (seals != 0) (void)::fcntl(memory, F_ADD_SEALS, seals);
      passed.assign((how & 3) == 2 ? 3 : 1, memory);
    }
    iovec part{const_cast<void*>(data), size};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(3 * sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (!passed.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(passed.size() * sizeof(int));
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(passed.size() * sizeof(int));
      std::memcpy(CMSG_DATA(header), passed.data(), passed.size() * sizeof(int));
    }
    (void)::sendmsg(descriptor_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (!passed.empty()) ::close(passed[0]);
  }

  asio::io_context context_;
  PeerId self_ = PeerId::random();
  HostKey word_{peer(9).bytes};
  PeerId other_ = peer(2);
  PeerId up_;
  Proof challenge_;
  bool fresh_ = false;  // the last step connected
  node::Neighbours neighbours_;
  int descriptor_ = -1;
};

}  // namespace
}  // namespace pccl::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace pccl::fuzz;
  Script script(data, size);
  World world;
  for (int steps = 0; !script.empty() && steps < 100; ++steps) world.step(script);
  return 0;
}
