// Fills links shortly before an operation that the program announces. A connection that was idle
// for a fraction of a second begins slowly again (RFC 5681, section 4.1), and takes several round
// trips to its full rate. With filler it has that rate when the operation begins. Sans-I/O: the
// engine asks for frames to send.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>

#include "pccl/base/ids.h"
#include "pccl/link/stripe.h"

namespace pccl::measured {

// An operation that the program announces.
struct Announcement {
  std::uint64_t bytes = 0;  // of its arrays, as they travel; 0: not known
  bool coded = false;       // its arrays are quantized
};

// *one thread: the engine's*
class Primer {
 public:
  // A connection with a shorter round trip reaches its rate at once.
  static constexpr Duration kShortest = std::chrono::milliseconds(5);
  // Filler begins so many round trips before the expected time. A connection doubles its rate in
  // each, from 10 packets on.
  static constexpr int kLead = 6;
  // An operation may begin so much later than expected.
  static constexpr Duration kLate = std::chrono::seconds(1);
  // After a shorter pause a connection keeps its rate: the least time that Linux waits for a
  // confirmation (TCP_RTO_MIN).
  static constexpr Duration kPause = std::chrono::milliseconds(200);

  struct Way {
    PeerId peer;
    Duration round_trip{};
    std::uint64_t window = 0;  // bytes that are on the way at full rate
    std::uint64_t most = 0;    // bytes of filler in all
    std::size_t stripes = 1;   // that share the window
  };

  // The next operation sends to these peers, from about `expected` on. Replaces an earlier
  // announcement.
  void begin(std::span<const Way> ways, Instant expected);
  // The operation has begun.
  void end() { links_.clear(); }
  [[nodiscard]] bool active() const { return !links_.empty(); }
  // Whether filler is on the way, or will be in a moment.
  [[nodiscard]] bool filling(Instant now) const;

  // Call as time passes. True: there may be frames to send to all peers.
  bool on_time(Instant now);
  // Instant::max(): not active.
  [[nodiscard]] Instant next_deadline() const;
  // True with filler for that stripe in `frame`.
  bool next(const PeerId& to, std::uint64_t stripe, link::OutgoingFrame& frame);

 private:
  struct Link {
    Way way;
    Instant due{};                                 // the next portion
    bool started = false;                          // the first portion was
    std::uint64_t left = 0;                        // of the portion
    std::map<std::uint64_t, std::uint64_t> taken;  // by stripe: bytes of the portion
  };
  std::map<PeerId, Link> links_;
  Instant expected_{};
};

}  // namespace pccl::measured
