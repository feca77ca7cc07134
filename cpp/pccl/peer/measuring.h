// Rates and round trips of the links, from an optimize_topology call, which measures all links at
// once, and from ordinary traffic. The master plans with both, and links are primed by them.
// Pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>

#include "pccl/measured/live_rates.h"
#include "pccl/measured/primer.h"
#include "pccl/measured/prober.h"
#include "pccl/peer/call_driver.h"
#include "pccl/peer/locality.h"

namespace pccl::peer {

struct MeasuringOptions {
  std::uint64_t probe_bytes = 0;  // the most bytes sent to each peer for a measurement; in
                                  // primed links, the most on the way
  Duration heartbeat_interval{};
};

// *one thread: the engine's*
class Measuring {
 public:
  Measuring(const MeasuringOptions& options, CallDriver& calls, Session& session,
            link::LinkTable& links, const Locality& locality)
      : options_(options), calls_(calls), session_(session), links_(links), locality_(locality) {}

  // -- an optimize_topology call, which takes about three seconds
  // REQUIRES: not active().
  void start(const CallPtr& call);
  [[nodiscard]] bool active() const { return round_.has_value(); }
  [[nodiscard]] bool owns(const wire::RoundKey& key) const {
    return round_ && key == round_->key();
  }
  // Sequence numbers that a call takes: one for each of its rounds.
  static constexpr std::uint64_t kRounds = 2;
  void on_outcome(const Error& error, const link::LinkContext& context);
  // Ends the call, also before its last round. REQUIRES: active().
  void end(Error error, const Record& record);
  // The call measures now, and does not wait for a call of another member.
  [[nodiscard]] bool proceeds(const CallPtr& call) const {
    return measures() && call == round_->call;
  }
  // Links to this peer are kept until all members have measured.
  [[nodiscard]] bool probes(const PeerId& peer) const {
    return round_ && round_->probed.contains(peer);
  }
  // True once after each change of the links that are needed.
  [[nodiscard]] bool take_links_changed() { return std::exchange(links_changed_, false); }
  // Wakes the links that are being measured: they may have something to send.
  void wake_links();

  // -- ordinary traffic
  void begin_epoch(const Record& record, Instant now);
  // Reports round trips of connections that the table lacks, if one of this member's is long. A
  // plan that knows them is a good one before links have been idle, or full.
  void tell_round_trips(Instant now);
  // Samples the links. `reducing`: operations run over links.
  void watch(bool reducing, Instant now);
  // Counts the bytes received on a stripe since the previous call.
  void count(const link::Stripe& from, Instant now);
  void on_pong(const PeerId& peer, const link::FrameHeader& header, bool reducing, Instant now);

  // -- before an operation
  // The next one begins at about that time: primes the links to which it sends.
  void expect_operation(Instant at, const measured::Announcement& announced);
  [[nodiscard]] measured::Primer& primer() { return primer_; }
  [[nodiscard]] const measured::Primer& primer() const { return primer_; }

  void on_time(const link::LinkContext& context);
  [[nodiscard]] Instant next_deadline() const {
    return std::min(measures() ? prober_.next_deadline() : Instant::max(), primer_.next_deadline());
  }
  [[nodiscard]] measured::Prober& prober() { return prober_; }

 private:
  struct Round {
    CallPtr call;
    enum class Phase : std::uint8_t { meeting, measuring, telling };
    Phase phase = Phase::meeting;
    std::set<PeerId> probed;
    [[nodiscard]] const wire::RoundKey& key() const { return std::get<wire::RoundKey>(call->key); }
  };
  [[nodiscard]] bool measures() const { return round_ && round_->phase == Round::Phase::measuring; }
  void enter(const wire::RoundKey& key, wire::RoundPayload payload);
  void measure(const link::LinkContext& context);
  void tell(const link::LinkContext& context);
  void tell_rates(Instant now);

  MeasuringOptions options_;
  CallDriver& calls_;
  Session& session_;
  link::LinkTable& links_;
  const Locality& locality_;
  std::optional<Round> round_;
  measured::Prober prober_;
  bool links_changed_ = false;

  measured::LiveRates live_rates_;
  Instant looked_{};
  Instant next_pings_{};
  bool reduced_ = false;  // at the last look

  measured::Primer primer_;
};

}  // namespace pccl::peer
