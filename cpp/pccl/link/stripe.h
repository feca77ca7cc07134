// The byte pump of one connection: cuts what arrives into frames and puts payloads where they
// belong; lines up frames to be written. Sans-I/O: the shell asks where bytes go and says how many
// went.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pccl/base/buffer.h"
#include "pccl/base/error.h"
#include "pccl/link/frame.h"

namespace pccl::link {

class Stripe;

// Payload bytes that were lined up and not written whole, by the operation's token.
using UnsentBytes = std::map<std::uint64_t, std::uint64_t>;

// Where a data frame's payload goes.
struct Placement {
  enum class Kind : std::uint8_t {
    store,   // into `where`
    drain,   // read and forgotten
    hold,    // stop reading this stripe until resume()
    refuse,  // the frame is impossible: `reason`; the link ends
  };
  Kind kind = Kind::drain;
  std::vector<iovec> where;  // store: payload_bytes in all
  Buffer buffer;             // store: engine memory that `where` points into, if it does
  std::uint64_t token = 0;   // store: the operation, for release(); 0: none yet
  std::string reason;
};

// A frame to be written.
struct OutgoingFrame {
  std::array<std::uint8_t, kFrameHeaderBytes> header{};
  std::vector<iovec> payload;  // memory of the operation `token`, or of `owned`
  std::uint32_t payload_bytes = 0;
  std::uint64_t token = 0;        // 0: belongs to no operation
  std::uint32_t eager_bytes = 0;  // of the link's eager room
  bool trailer = false;
  bool released = false;  // its operation has ended: never to be sent again
  wire::Bytes owned;      // a small payload of its own
  Buffer packed;          // engine memory that `payload` points into, if it does
};
[[nodiscard]] FrameType type_of(const OutgoingFrame& frame);

// What was lined up on a stripe that has ended and is not known to have come.
struct LeftFrames {
  std::uint64_t first = 0;  // number of the first one on that stripe
  std::deque<OutgoingFrame> frames;
};
// Of `frames`: forgets the memory of that operation. They stay, so that the others keep their
// numbers.
void release(std::deque<OutgoingFrame>& frames, std::uint64_t token);

// Whoever runs over stripes. *one thread: the engine's*
class Traffic {
 public:
  virtual ~Traffic() = default;
  virtual Placement place(Stripe& from, const FrameHeader& header) = 0;
  // A stored data frame is complete and verified. `token` and `buffer` are the placement's.
  virtual Status arrived(Stripe& from, const FrameHeader& header, std::uint64_t token,
                         Buffer buffer) = 0;
  // A stored data frame will not arrive: its sender gave it up.
  virtual void voided(Stripe& from, const FrameHeader& header, std::uint64_t token) = 0;
  // A data frame that was not stored, or whose place was released while it came, is over.
  virtual void drained(Stripe& from, const FrameHeader& header) = 0;
  // A data frame that was being stored goes no further on this stripe, which has ended. It may come
  // again, whole, on another one.
  virtual void interrupted(Stripe& from, const FrameHeader& header, std::uint64_t token) = 0;
  // A frame of another type is complete.
  virtual Status control(Stripe& from, const FrameHeader& header,
                         std::span<const std::uint8_t> payload) = 0;
  // The next frame for this stripe, if there is one.
  virtual bool next(Stripe& to, OutgoingFrame& frame) = 0;
};

[[nodiscard]] OutgoingFrame make_frame(const FrameHeader& header, wire::Bytes payload = {});
// The same with a checksum, whatever the link: a spoilt number in a handshake or a notice would
// name another stripe.
[[nodiscard]] OutgoingFrame make_checked_frame(FrameType type, wire::Bytes payload);
// The checksum a data frame carries.
[[nodiscard]] std::uint64_t checksum(const FrameHeader& header, std::span<const iovec> payload);

class Stripe {
 public:
  // `id` is the shell's.
  Stripe(std::uint64_t id, Traffic& traffic) : id_(id), traffic_(traffic) {}
  Stripe(const Stripe&) = delete;
  Stripe& operator=(const Stripe&) = delete;

  [[nodiscard]] std::uint64_t id() const { return id_; }

  // -- writing. What to write next; empty when there is nothing. Valid until the next call of any
  // method.
  std::span<const iovec> outgoing();
  void sent(std::size_t bytes);
  void push(OutgoingFrame frame) {
    queue_.push_back(std::move(frame));
  }  // ahead of the traffic's frames
  [[nodiscard]] bool idle() const { return queue_.empty(); }

  // -- reading. Where the next bytes go; empty while held. Valid until the next call of any method.
  std::span<const iovec> incoming();
  Status received(std::size_t bytes);
  [[nodiscard]] bool held() const { return phase_ == Phase::held; }
  // Asks again where the held frame goes.
  Status resume();

  // -- standing in for each other
  // From now on what was sent is kept until confirm(), and little is lined up ahead of the socket:
  // that may go on another stripe sooner. REQUIRES: called before anything is written.
  void keep() { keeps_ = true; }
  void keep_nothing() {
    keeps_ = false;
    sent_.clear();
    confirmed_ = 0;
  }
  [[nodiscard]] std::uint64_t frames_received() const { return frames_received_; }
  // So much has come since the other end was told last that it should be told.
  [[nodiscard]] bool owes_confirmation() const;
  // A heartbeat, which tells it.
  void push_heartbeat();
  // The other end says how many of our frames have come. False: it cannot be so.
  [[nodiscard]] bool confirm(std::uint64_t frames);
  [[nodiscard]] std::size_t unconfirmed() const { return sent_.size(); }
  // The stripe has ended: what may have to be sent again.
  [[nodiscard]] LeftFrames end();

  // The operation's memory is used no more when this returns: frames not begun are dropped, a
  // half-sent one goes on from filler and is void, a half-received one is drained. Waits for
  // nobody. Returns the eager bytes of the frames that were dropped.
  std::uint64_t release(std::uint64_t token);
  // Payload bytes of that operation's frames that are not written whole.
  [[nodiscard]] std::uint64_t unsent(std::uint64_t token) const;
  // Adds them up for every operation.
  void add_unsent(UnsentBytes& by_token) const;

  [[nodiscard]] std::uint64_t bytes_sent() const { return bytes_sent_; }
  [[nodiscard]] std::uint64_t bytes_received() const { return bytes_received_; }

 private:
  enum class Phase : std::uint8_t { header, payload, held };
  Status take_header();
  Status place_payload();
  Status finish_frame();
  Status take_ahead();                          // bytes that were read together with a header
  std::size_t skip_payload(std::size_t bytes);  // of `bytes`, how many were payload
  void drain_rest();

  std::uint64_t id_;
  Traffic& traffic_;

  // writing
  std::deque<OutgoingFrame> queue_;
  std::size_t front_sent_ = 0;  // bytes of queue_.front() already written
  std::vector<iovec> out_;
  std::uint64_t bytes_sent_ = 0;
  bool keeps_ = false;
  std::deque<OutgoingFrame> sent_;  // whole, and not confirmed
  std::uint64_t confirmed_ = 0;     // frames; sent_ begins there

  // reading
  Phase phase_ = Phase::header;
  std::array<std::uint8_t, kFrameHeaderBytes> header_bytes_{};
  std::size_t header_filled_ = 0;
  FrameHeader header_;
  Placement placement_;
  std::vector<iovec> rest_;  // what of the payload is still to come, trailer included
  std::size_t rest_at_ = 0;
  std::array<std::uint8_t, kTrailerBytes> trailer_{};
  wire::Bytes small_;  // payload of a control frame
  std::unique_ptr<std::uint8_t[]> drain_;
  std::vector<std::uint8_t> ahead_;  // read together with a header
  std::size_t ahead_at_ = 0;
  std::size_t ahead_end_ = 0;
  std::vector<iovec> in_;
  std::uint64_t bytes_received_ = 0;
  std::uint64_t frames_received_ = 0;  // whole
  std::uint64_t frames_told_ = 0;      // of these, the other end knows
  std::uint64_t bytes_told_ = 0;
};

}  // namespace pccl::link
