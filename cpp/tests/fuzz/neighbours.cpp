// The protocol of neighbours on one host, over a real socket: packets from a peer that knows the
// key or not, with valid or invalid memory.
#include "pccl/node/neighbours.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <asio/io_context.hpp>
#include <cstddef>
#include <cstring>
#include <vector>

#include "fuzz.h"
#include "pccl/digest/proof.h"
#include "pccl/memory/board.h"
#include "pccl/memory/pipe.h"

namespace pccl::fuzz {
namespace {

constexpr std::size_t kPacketBytes = 88;

int connect_to(const PeerId& peer) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "pccl-" + peer.hex();
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const int descriptor = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  must(descriptor >= 0 && ::connect(descriptor, reinterpret_cast<sockaddr*>(&address), size) == 0,
       "it listens");
  return descriptor;
}

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
             [] {}}) {
    must(static_cast<bool>(neighbours_.listen()), "it can listen");
    descriptor_ = connect_to(self_);
  }
  ~World() { ::close(descriptor_); }

  void step(Script& script) {
    const std::uint8_t what = script.byte();
    if (what % 8 == 0) {
      ::close(descriptor_);
      descriptor_ = connect_to(self_);
    } else if (what % 8 == 1) {
      neighbours_.offer(other_, memory::Offer::array, script.byte(), nullptr);
      neighbours_.ring(other_);
    } else {
      const std::uint8_t flags = script.byte();
      std::array<std::uint8_t, kPacketBytes + 8> packet{};
      const auto given = script.piece();
      std::copy_n(given.begin(), std::min(given.size(), packet.size()), packet.begin());
      if ((flags & 1) == 0) greet(packet, flags);
      send(packet.data(), (flags & 2) != 0 ? std::min(given.size(), packet.size()) : kPacketBytes,
           flags >> 4);
    }
    context_.restart();
    context_.poll();
    neighbours_.poll();
    std::array<std::uint8_t, 256> answer{};
    while (::recv(descriptor_, answer.data(), answer.size(), MSG_DONTWAIT) > 0) {
    }
  }

 private:
  // Fills in the fields of a valid packet, and the proof of a hello.
  void greet(std::array<std::uint8_t, kPacketBytes + 8>& packet, std::uint8_t flags) {
    const std::uint32_t magic = 0x4c4c4350;
    const std::uint16_t version = 3;
    std::memcpy(packet.data(), &magic, sizeof magic);
    std::memcpy(packet.data() + 4, &version, sizeof version);
    packet[6] = static_cast<std::uint8_t>(packet[6] % 6);
    packet[7] = 0;
    if ((flags & 4) != 0) return;
    packet[6] = 0;                         // a hello
    std::memset(packet.data() + 8, 0, 8);  // host
    std::memcpy(packet.data() + 40, other_.bytes.data(), 16);
    std::memcpy(packet.data() + 56, self_.bytes.data(), 16);
    std::array<std::uint64_t, 7> about{};
    std::memcpy(&about[2], packet.data() + 16, 8);
    std::memcpy(&about[3], other_.bytes.data(), 16);
    std::memcpy(&about[5], self_.bytes.data(), 16);
    const PeerId proof = digest::proof(word_, about);
    std::memcpy(packet.data() + 72, proof.bytes.data(), 16);
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
  PeerId word_ = peer(9);
  PeerId other_ = peer(2);
  PeerId up_;
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
