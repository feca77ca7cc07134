// Frames between peers: a fixed header, a payload, and after data a trailer.
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
  hello,      // newer -> older peer, its first frame on a stripe; payload Hello. Answered by
              // welcome or refused
  welcome,    // older -> newer; payload Hello with from/to swapped
  refused,    // answers hello or offer; payload a sentence. The connection ends
  heartbeat,  // both ways, when nothing else was sent for an interval, or to confirm frames;
              // `attempt` is the number of complete frames received on this stripe
  data,       // one segment of an operation; followed by a trailer
  ready,  // receiver -> contributor: send `credit` more segments of this operation's partial phase
  ask,    // contributor -> receiver: eager room is used up; send ready when this operation is
          // posted
  eager_return,  // receiver -> contributor: `credit` bytes of eager data were consumed
  fetch,         // receiver -> holder of the shared state: send these; payload Fetch
  state,         // holder -> receiver: a chunk of the state, or its manifest; followed by a trailer
  lost,          // both ways: a stripe of this link has ended at the sender; payload Lost
  ping,          // asks for a pong; `attempt` is the sender's clock
  pong,          // with the ping's `attempt`
  probe,         // saturates the path while it is measured; discarded; followed by a trailer
  probed,        // the rate at which probes arrived: `credit` kB/s from the receiver of this frame,
                 // `attempt` kB/s from all `segment` peers that sent some
  offer,    // older -> newer, first frame on a stripe that the older peer dialled: send a hello on
            // it; payload Hello. Answered by hello or refused
  wanted,   // newer -> older, if only the older peer can dial: offer `credit` more stripes
  located,  // holder -> receiver on its host: where it reads chunks itself; payload Located
};
constexpr unsigned enum_count(FrameType) { return 18; }
// The traffic places these payloads (Traffic::place). All others are at most kMaxSmallPayload.
constexpr bool carries_data(FrameType type) {
  return type == FrameType::data || type == FrameType::state || type == FrameType::probe;
}

inline constexpr std::uint32_t kFrameMagic = 0x31464350;  // "PCF1"
inline constexpr std::size_t kFrameHeaderBytes = 72;
inline constexpr std::size_t kTrailerBytes = 8;
inline constexpr std::uint64_t kTrailerValid = 0x646e656c6c697770;
// The sender gave the frame up half-way: ignore it.
inline constexpr std::uint64_t kTrailerVoid = 0x64696f7664696f76;
inline constexpr std::uint32_t kMaxSmallPayload = 4096;  // of every type that carries no data
// A segment of 2^24 bytes, widened eightfold.
inline constexpr std::uint32_t kMaxDataPayload = 1U << 27;

struct FrameHeader {
  std::uint32_t magic = kFrameMagic;
  FrameType type = FrameType::heartbeat;
  bool final = false;  // data: final bytes (else a contribution)
  bool eager = false;  // data: sent without a grant; counts against the link's eager room
  std::uint8_t version = wire::kProtocolVersion;
  std::uint32_t payload_bytes = 0;
  // Low bits of the operation's signature: members that disagree never mix bytes.
  std::uint32_t signature = 0;
  wire::OpKey key{};           // 25 bytes
  std::uint64_t attempt = 0;   // epoch in which the sender runs the operation; heartbeat: frames
  std::uint32_t segment = 0;   // index into the operation's layout
  std::uint32_t credit = 0;    // ready: segments; eager_return: bytes
  std::uint64_t checksum = 0;  // XXH3-64 of header (this field zero) and payload; 0: not checked
  std::uint8_t padding0 = 0;
  std::uint16_t padding1 = 0;
  std::uint32_t header_check = 0;  // low half of XXH3-64 of the 68 bytes before. A corrupt header
                                   // may name another operation or length, so it is rejected
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.magic, self.type, self.final, self.eager, self.version, self.payload_bytes,
          self.signature, self.key, self.attempt, self.segment, self.credit, self.checksum,
          self.padding0, self.padding1, self.header_check);
  }
};

// The two ends of a stripe, and the link that it belongs to.
struct Hello {
  std::uint64_t run = 0;
  PeerId from;
  PeerId to;
  std::uint64_t generation = 0;  // chosen by the dialler; a higher one replaces the link
  std::uint32_t stripe = 0;      // counts all stripes of the generation; 0 establishes the link
  bool keeps = false;  // both ends keep sent frames until they are confirmed, so that other stripes
                       // can stand in for one that ends; equal on all stripes but pipes
  bool memory = false;             // the stripe is a pipe
  std::uint32_t heartbeat_ms = 0;  // the sender's interval between signs of life
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.run, self.from, self.to, self.generation, self.stripe, self.keeps, self.memory,
          self.heartbeat_ms);
  }
};

// The reasons of a refusal: by a peer other than `to`, and by `to` in another run. No run has the
// id 0, so a hello of run 0 finds out who listens and has no other effect.
inline constexpr std::string_view kAnotherPeer = "another peer listens here";
inline constexpr std::string_view kAnotherRun = "not of this run";

// A stripe has ended at the sender of this notice, after `received` frames. The later ones must be
// sent again on other stripes.
struct Lost {
  std::uint64_t generation = 0;
  std::uint32_t stripe = 0;
  std::uint64_t received = 0;  // complete frames, the handshake's included
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.generation, self.stripe, self.received);
  }
};

// Computes `header_check`; ignores its value in `header`.
[[nodiscard]] std::array<std::uint8_t, kFrameHeaderBytes> encode(const FrameHeader& header);
// unreachable: the bytes are corrupt or of another protocol; only the connection must end. refused:
// the sender violates the protocol or a limit; the link must end.
[[nodiscard]] Result<FrameHeader> decode(std::span<const std::uint8_t, kFrameHeaderBytes> bytes);

// The other end violates the protocol or a limit: the link ends.
[[nodiscard]] inline Status refused(const char* why) { return Status(Code::refused, why); }

}  // namespace pccl::link
