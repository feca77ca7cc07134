// Measures the links to other peers for a round of optimize_topology: first round trips while
// nothing else moves, then the rates of all flows at once. All members begin at about the same
// time. Sans-I/O: the engine asks for frames to send and reports those received.
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
  // Times since begin(). Round trips are measured until kFill, while missing links are established.
  // Senders fill links from kFill to kFilled. Receivers count from kCount, when connections have
  // reached their rate, to kCounted. kFilled is later, since the members' clocks began at different
  // moments. kOver ends the measurement.
  static constexpr Duration kPingEvery = std::chrono::milliseconds(100);
  static constexpr Duration kFill = std::chrono::milliseconds(400);
  static constexpr Duration kCount = std::chrono::milliseconds(1500);
  static constexpr Duration kCounted = std::chrono::milliseconds(2300);
  static constexpr Duration kFilled = std::chrono::milliseconds(2450);
  static constexpr Duration kOver = std::chrono::milliseconds(2800);

  // `most_bytes`: limit of the filler to each peer. Tests set it low.
  void begin(const std::vector<PeerId>& peers, std::uint64_t most_bytes, Instant now);
  void end() { ways_.clear(); }
  [[nodiscard]] bool active() const { return !ways_.empty(); }
  // How many stripes to each peer carry filler; 0: not active.
  [[nodiscard]] std::size_t fillers() const {
    return active() ? std::max<std::size_t>(4, 16 / ways_.size()) : 0;
  }
  [[nodiscard]] bool probes(const PeerId& peer) const { return ways_.contains(peer); }
  // Drops all peers that are not in `members`.
  void keep(const std::vector<wire::Member>& members);

  // Call as time passes. True: there may be frames to send to all peers.
  bool on_time(Instant now);
  [[nodiscard]] Instant next_deadline() const { return next_; }
  [[nodiscard]] bool answered(const PeerId& peer) const;
  // All peers have reported their counts, or the time for it is over.
  [[nodiscard]] bool over(Instant now) const;

  // True with a frame in `frame`: a ping or a report, which goes first; filler.
  bool next_word(const PeerId& to, Instant now, link::OutgoingFrame& frame);
  bool next_filler(const PeerId& to, Instant now, link::OutgoingFrame& frame);
  void on_pong(const PeerId& from, const link::FrameHeader& header, Instant now);
  // Counts all received bytes, not only filler.
  void on_bytes(const PeerId& from, std::uint64_t bytes, Instant now);
  void on_probed(const PeerId& from, const link::FrameHeader& header);

  // The results: round trips, the rates of all flows together, and each pair's rate beside the
  // others. A pair gets a rate of its own only if it is the bottleneck itself: it carried much less
  // than its part of both ends' rates, and neither other flows nor a longer round trip explain
  // that.
  [[nodiscard]] wire::Measurements row() const;

 private:
  struct Way {
    std::optional<Duration> rtt;  // the least
    bool ping_due = false;
    bool word_due = false;       // the report of the rate received from it is due
    std::uint64_t left = 0;      // bytes of filler that may still be sent
    std::uint64_t received = 0;  // bytes between kCount and kCounted
    bool heard = false;
    std::optional<std::uint32_t> sent_rate;  // kB/s, as counted by the other end
    std::uint64_t its_down = 0;              // kB/s that the other end received from all peers
    std::uint32_t its_senders = 0;
  };
  [[nodiscard]] static std::uint32_t rate_of(std::uint64_t bytes);

  std::map<PeerId, Way> ways_;
  Instant began_{};
  Instant next_{};
  bool counted_ = false;
};

}  // namespace pccl::measured
