// The byte pump of one connection: parses received bytes into frames, places their payloads, and
// queues frames to be written. Sans-I/O: the shell asks for buffers and reports how many bytes it
// read or wrote.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pccl/base/buffer.h"
#include "pccl/base/error.h"
#include "pccl/link/frame.h"

namespace pccl::link {

class Stripe;

[[nodiscard]] inline iovec vec(const void* data, std::size_t size) {
  return {const_cast<void*>(data), size};
}

// Payload bytes of queued frames that are not completely written, by the operation's token.
using UnsentBytes = std::map<std::uint64_t, std::uint64_t>;

// Where a data frame's payload goes.
struct Placement {
  enum class Kind : std::uint8_t {
    store,   // into `where`
    drain,   // read and discarded
    hold,    // stop reading this stripe until resume()
    refuse,  // the frame violates the protocol: `reason`; the link ends
  };
  Kind kind = Kind::drain;
  std::vector<iovec> where;  // store: payload_bytes in all
  Buffer buffer;             // store: owns the memory of `where`, if that is the engine's
  std::uint64_t token = 0;   // store: the operation, for release(); 0: none yet
  std::string reason;
};

// A frame to be written.
struct OutgoingFrame {
  std::array<std::uint8_t, kFrameHeaderBytes> header{};
  std::vector<iovec> payload;  // memory of the operation `token`, or of `owned`
  std::uint32_t payload_bytes = 0;
  std::uint64_t token = 0;        // 0: belongs to no operation
  std::uint32_t eager_bytes = 0;  // taken from the link's eager room
  bool trailer = false;
  bool checksum_due = false;  // it is computed just before the frame is written
  bool released = false;      // its operation has ended: not sent again
  wire::Bytes owned;          // a small payload
  Buffer packed;              // owns the memory of `payload`, if that is the engine's
};
[[nodiscard]] FrameType type_of(const OutgoingFrame& frame);

// Frames of an ended stripe that the other end has not confirmed.
struct LeftFrames {
  std::uint64_t first = 0;  // the first frame's number on that stripe
  std::deque<OutgoingFrame> frames;
};
// Drops the payloads of that operation's frames. The frames stay in the queue, since positions are
// frame numbers.
void release(std::deque<OutgoingFrame>& frames, std::uint64_t token);

// The user of stripes: places received payloads and supplies frames to send.
// *one thread: the engine's*
class Traffic {
 public:
  virtual ~Traffic() = default;
  virtual Placement place(Stripe& from, const FrameHeader& header) = 0;
  // A stored data frame is complete and verified. `token` and `buffer` are the placement's.
  virtual Status arrived(Stripe& from, const FrameHeader& header, std::uint64_t token,
                         Buffer buffer) = 0;
  // A stored data frame will not arrive: its sender voided it or, for state, its place was
  // released.
  virtual void voided(Stripe& from, const FrameHeader& header, std::uint64_t token) = 0;
  // A data frame is complete that was not stored, or whose place was released while it arrived.
  virtual void drained(Stripe& from, const FrameHeader& header) = 0;
  // A data frame that was being stored stops here, since the stripe ends. It may arrive again,
  // complete, on another stripe.
  virtual void interrupted(Stripe& from, const FrameHeader& header, std::uint64_t token) = 0;
  // A frame of another type is complete.
  virtual Status control(Stripe& from, const FrameHeader& header,
                         std::span<const std::uint8_t> payload) = 0;
  // True with the next frame for this stripe in `frame`; false: there is none.
  virtual bool next(Stripe& to, OutgoingFrame& frame) = 0;
};

[[nodiscard]] OutgoingFrame make_frame(const FrameHeader& header, wire::Bytes payload = {});
// Adds a checksum, even on links without checksums: a corrupt number in a handshake or a notice
// would name another stripe.
[[nodiscard]] OutgoingFrame make_checked_frame(FrameHeader header, wire::Bytes payload);
// FrameHeader::checksum for that header and payload; never 0.
[[nodiscard]] std::uint64_t checksum(const FrameHeader& header, std::span<const iovec> payload);

// *one thread: the engine's* While that thread waits, other threads may call the methods that touch
// this stripe alone. One thread may read while another one writes.
class Stripe {
 public:
  // `id` is the shell's.
  Stripe(std::uint64_t id, Traffic& traffic) : id_(id), traffic_(traffic) {}
  Stripe(const Stripe&) = delete;
  Stripe& operator=(const Stripe&) = delete;

  [[nodiscard]] std::uint64_t id() const { return id_; }

  // -- writing
  // The bytes to write next; empty: nothing to write. Valid until the next call of any method.
  std::span<const iovec> outgoing() {
    gather();
    return gathered();
  }
  // The two parts of outgoing(). gather() takes frames from the traffic. gathered() returns their
  // bytes, and touches this stripe alone.
  void gather();
  std::span<const iovec> gathered();
  [[nodiscard]] std::size_t gathered_bytes() const;
  // Touches this stripe alone.
  void sent(std::size_t bytes);
  // Queues a frame ahead of those that the traffic has not supplied yet.
  void push(OutgoingFrame frame) { queue_.push_back(std::move(frame)); }
  [[nodiscard]] bool idle() const { return queue_.empty(); }

  // -- reading
  // Where the next bytes go; empty while held. Valid until the next call of any method.
  // Touches this stripe alone.
  std::span<const iovec> incoming();
  // The rest of the payload that is being received, with its trailer.
  [[nodiscard]] std::size_t payload_left() const;
  // Optional, before received(bytes): computes the checksum of a frame that these bytes complete.
  // Touches this stripe alone.
  void check(std::size_t bytes);
  Status received(std::size_t bytes);
  [[nodiscard]] bool held() const { return phase_ == Phase::held; }
  // Asks again where the held frame goes.
  Status resume();

  // -- standing in for each other
  // Keeps sent frames until confirm(), and queues few frames ahead of the socket, since another
  // stripe may send them sooner. REQUIRES: called before anything is written.
  void keep() { keeps_ = true; }
  void keep_nothing() {
    keeps_ = false;
    sent_.clear();
    confirmed_ = 0;
  }
  [[nodiscard]] std::uint64_t frames_received() const { return frames_received_; }
  // Enough has arrived since the last confirmation that a new one is due.
  [[nodiscard]] bool owes_confirmation() const;
  // Queues a heartbeat, which confirms all frames received.
  void push_heartbeat();
  // The other end confirms the first `frames` frames. False: that many were not sent.
  [[nodiscard]] bool confirm(std::uint64_t frames);
  [[nodiscard]] std::size_t unconfirmed() const { return sent_.size(); }
  // Ends the stripe. Returns the frames that may have to be sent again.
  [[nodiscard]] LeftFrames end();

  // Ends all use of the operation's memory. Frames not begun are dropped, a half-sent frame is
  // completed with filler and marked void, a half-received frame is drained. Never blocks. Returns
  // the eager bytes of the dropped frames.
  std::uint64_t release(std::uint64_t token);
  // Payload bytes of that operation's frames that are not completely written.
  [[nodiscard]] std::uint64_t unsent(std::uint64_t token) const;
  // Adds these bytes for every operation.
  void add_unsent(UnsentBytes& by_token) const;

  [[nodiscard]] std::uint64_t bytes_sent() const { return bytes_sent_; }
  [[nodiscard]] std::uint64_t bytes_received() const { return bytes_received_; }

 private:
  enum class Phase : std::uint8_t { header, payload, held };
  Status take_header();
  Status place_payload();
  Status finish_frame();
  Status take_ahead();
  std::size_t skip_payload(std::size_t bytes);  // returns how many of `bytes` were payload
  void drain_rest();

  std::uint64_t id_;
  Traffic& traffic_;

  // writing
  std::deque<OutgoingFrame> queue_;
  std::size_t front_sent_ = 0;  // bytes of queue_.front() already written
  std::vector<iovec> out_;
  std::uint64_t bytes_sent_ = 0;
  bool keeps_ = false;
  std::deque<OutgoingFrame> sent_;  // completely written, not confirmed
  std::uint64_t confirmed_ = 0;     // frames; the number of sent_.front()

  // reading
  Phase phase_ = Phase::header;
  std::array<std::uint8_t, kFrameHeaderBytes> header_bytes_{};
  std::size_t header_filled_ = 0;
  FrameHeader header_;
  Placement placement_;
  std::optional<std::uint64_t> checked_;  // the checksum that check() has computed
  std::vector<iovec> rest_;               // where the rest of the payload and the trailer go
  std::size_t rest_at_ = 0;
  std::array<std::uint8_t, kTrailerBytes> trailer_{};
  wire::Bytes small_;  // payload of a control frame
  std::unique_ptr<std::uint8_t[]> drain_;
  std::vector<std::uint8_t> ahead_;  // read together with a header
  std::size_t ahead_at_ = 0;
  std::size_t ahead_end_ = 0;
  std::vector<iovec> in_;
  std::uint64_t bytes_received_ = 0;
  std::uint64_t frames_received_ = 0;  // complete
  std::uint64_t frames_told_ = 0;      // confirmed to the other end
  std::uint64_t bytes_told_ = 0;
};

}  // namespace pccl::link
