// Frames between peers: a fixed header, a payload, and behind data a trailer.
// docs/internals/protocol.md has the table.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "pccl/wire/codec.h"
#include "pccl/wire/records.h"

namespace pccl::link {

enum class FrameType : std::uint8_t {
  hello,      // newer -> older peer, its first on a stripe; payload Hello. Answered by welcome or
              // refused
  welcome,    // older -> newer; payload Hello with from/to swapped
  refused,    // to who spoke first; payload a sentence. The connection ends
  heartbeat,  // both ways, when nothing else was sent for an interval; `attempt` is the number of
              // whole frames that have come on this stripe
  data,       // one segment of an operation; followed by a trailer
  ready,  // receiver -> contributor: send `credit` more segments of this operation's partial phase
  ask,    // contributor -> receiver: eager room is used up; please send ready when you have posted
          // this one
  eager_return,  // receiver -> contributor: `credit` bytes of eager data were consumed
  fetch,         // receiver -> holder of the shared state: please send these; payload Fetch
  state,         // holder -> receiver: a chunk of the state, or its manifest; followed by a trailer
  lost,    // both ways: a stripe of this link has ended here, after so many whole frames; payload
           // Lost
  ping,    // asks for a pong; `attempt` is the sender's clock
  pong,    // with the ping's `attempt`
  probe,   // fills the way while it is measured, and is forgotten; followed by a trailer
  probed,  // how fast probes came: `credit` kB/s from who gets this, `attempt` from all `segment`
           // peers that sent some
  offer,   // older -> newer, first on a stripe that the older one dialled: say hello here; payload
           // Hello. Answered by hello or refused
  wanted,  // newer -> older, where only the older can dial: offer `credit` more stripes
};
constexpr unsigned enum_count(FrameType) { return 17; }
// Payloads of these go where the engine says; all others are small.
constexpr bool carries_data(FrameType type) {
  return type == FrameType::data || type == FrameType::state || type == FrameType::probe;
}

inline constexpr std::uint32_t kFrameMagic = 0x31464350;  // "PCF1"
inline constexpr std::size_t kFrameHeaderBytes = 72;
inline constexpr std::size_t kTrailerBytes = 8;
inline constexpr std::uint64_t kTrailerValid = 0x646e656c6c697770;
inline constexpr std::uint64_t kTrailerVoid =
    0x64696f7664696f76;  // the sender gave the frame up half-way: ignore it
inline constexpr std::uint32_t kMaxSmallPayload = 4096;  // of every type that carries no data
inline constexpr std::uint32_t kMaxDataPayload =
    1U << 27;  // a segment of 2^24 bytes widened eightfold

struct FrameHeader {
  std::uint32_t magic = kFrameMagic;
  FrameType type = FrameType::heartbeat;
  bool final = false;  // data: final bytes (else a contribution)
  bool eager = false;  // data: sent without a grant; counts against the link's eager room
  std::uint8_t version = wire::kProtocolVersion;
  std::uint32_t payload_bytes = 0;
  std::uint32_t signature =
      0;            // low bits of the operation's signature: members that disagree never mix bytes
  wire::OpKey key;  // 25 bytes
  std::uint64_t attempt = 0;   // epoch in which the sender runs the operation; heartbeat: frames
  std::uint32_t segment = 0;   // index into the operation's layout
  std::uint32_t credit = 0;    // ready: segments; eager_return: bytes
  std::uint64_t checksum = 0;  // XXH3-64 of header (this field zero) and payload; 0: not checked
  std::uint8_t padding0 = 0;
  std::uint16_t padding1 = 0;
  std::uint32_t header_check = 0;  // low half of XXH3-64 of the 68 bytes before: a spoilt header
                                   // may name another operation or length, and is never believed
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.magic, self.type, self.final, self.eager, self.version, self.payload_bytes,
          self.signature, self.key, self.attempt, self.segment, self.credit, self.checksum,
          self.padding0, self.padding1, self.header_check);
  }
};

// Who is at the other end of a stripe, and which link it belongs to.
struct Hello {
  std::uint64_t run = 0;
  PeerId from;
  PeerId to;
  std::uint64_t generation = 0;  // chosen by the dialler; a higher one replaces the link
  std::uint32_t stripe = 0;      // counts all stripes of the generation; 0 brings the link about
  bool keeps = false;   // both ends keep what they send until it is known to have come, so that
                        // other stripes can stand in for one that ends; equal on all of the link
  bool memory = false;  // it goes through memory
  bool operator==(const Hello&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.run, self.from, self.to, self.generation, self.stripe, self.keeps, self.memory);
  }
};

// What a hello is refused with by everybody but `to`, and by `to` in another run. So who says hello
// in run 0, which is nobody's, learns who listens, and nothing else comes of it.
inline constexpr std::string_view kAnotherPeer = "another peer listens here";
inline constexpr std::string_view kAnotherRun = "not of this run";

// What had come on a stripe when it ended. All frames behind those go again, on other stripes.
struct Lost {
  std::uint64_t generation = 0;
  std::uint32_t stripe = 0;
  std::uint64_t received = 0;  // whole frames, the handshake's included
  bool operator==(const Lost&) const = default;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.generation, self.stripe, self.received);
  }
};

// Fills `header_check`, whatever it was.
[[nodiscard]] std::array<std::uint8_t, kFrameHeaderBytes> encode(const FrameHeader& header);
// Nothing when the bytes are no header of ours or break a limit. `unreachable`: they were spoilt
// under way, so it is the connection's fault; `refused`: the sender's.
[[nodiscard]] Result<FrameHeader> decode(std::span<const std::uint8_t, kFrameHeaderBytes> bytes);

}  // namespace pccl::link
