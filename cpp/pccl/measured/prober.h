// Measures the ways to other peers for a round of optimize_topology: round trips while nothing else
// moves, then what all flows carry at once. Sans-I/O: the engine asks what to send and says what
// came. All members begin at about the same time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/link/stripe.h"
#include "pccl/wire/records.h"

namespace pccl::measured {

// *one thread: the engine's*
class Prober {
 public:
  // Since the beginning. Connections are made while round trips are measured, and need some of
  // these to find their speed; senders go on a little longer than receivers count, whose clocks
  // began at other moments.
  static constexpr Duration kPingEvery = std::chrono::milliseconds(100);
  static constexpr Duration kFill = std::chrono::milliseconds(400);
  static constexpr Duration kCount = std::chrono::milliseconds(1500);
  static constexpr Duration kCounted = std::chrono::milliseconds(2300);
  static constexpr Duration kFilled = std::chrono::milliseconds(2450);
  static constexpr Duration kOver = std::chrono::milliseconds(2800);

  // `most_bytes`: how much is sent to each peer to fill its way; tests have none to waste.
  void begin(const std::vector<PeerId>& peers, std::uint64_t most_bytes, Instant now);
  void end() { ways_.clear(); }
  [[nodiscard]] bool active() const { return !ways_.empty(); }
  // On how many stripes to each peer.
  [[nodiscard]] std::size_t fillers() const {
    return active() ? std::max<std::size_t>(4, 16 / ways_.size()) : 0;
  }
  [[nodiscard]] bool probes(const PeerId& peer) const { return ways_.contains(peer); }
  // Others are out of the run.
  void keep(const std::vector<wire::Member>& members);

  // Time passes. True when there may be something to send to all of them.
  bool on_time(Instant now);
  [[nodiscard]] Instant next_deadline() const { return next_; }
  [[nodiscard]] bool answered(const PeerId& peer) const;
  // All have answered, or will not.
  [[nodiscard]] bool over(Instant now) const;

  // What is small and goes first; and what fills the way.
  bool next_word(const PeerId& to, Instant now, link::OutgoingFrame& frame);
  bool next_filler(const PeerId& to, Instant now, link::OutgoingFrame& frame);
  void on_pong(const PeerId& from, const link::FrameHeader& header, Instant now);
  // Anything that has come, not only what fills the way.
  void on_bytes(const PeerId& from, std::uint64_t bytes, Instant now);
  void on_probed(const PeerId& from, const link::FrameHeader& header);

  // What was found: round trips, and all flows together. Of one pair it says what it carried beside
  // the others, and a rate of its own only where that is it: it carried much less than its part of
  // what both ends carried, which neither the others' flows nor a longer round trip explain.
  [[nodiscard]] wire::Measurements row() const;

 private:
  struct Way {
    std::optional<Duration> rtt;  // the least
    bool ping_due = false;
    bool word_due = false;       // how fast we have received from it
    std::uint64_t left = 0;      // bytes that may be sent
    std::uint64_t received = 0;  // bytes, while counting
    bool heard = false;
    std::optional<std::uint32_t> sent_rate;  // as the other end counted, kB/s
    std::uint64_t its_down = 0;              // what it received from all, kB/s
    std::uint32_t its_senders = 0;
  };
  [[nodiscard]] static std::uint32_t rate_of(std::uint64_t bytes);

  std::map<PeerId, Way> ways_;
  Instant began_{};
  Instant next_{};
  bool counted_ = false;
};

}  // namespace pccl::measured
