// All links of one peer: which are needed, how they are established, their stripes, and how they
// end. Pure: events and the time come in, LinkEvents and LinkActions go out. LinkFacts has the
// facts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pccl/link/carrier.h"
#include "pccl/link/handshake.h"
#include "pccl/link/health.h"

namespace pccl::link {

// *one thread: the engine's*
class LinkTable final : public Carrier {
 public:
  // `traffic` places received payloads and supplies frames to send.
  LinkTable(LinkOptions options, Traffic& traffic) : facts_(std::move(options), traffic) {}
  LinkTable(const LinkTable&) = delete;  // its parts refer to each other
  LinkTable& operator=(const LinkTable&) = delete;

  // -- which links are needed
  // Makes `targets` the needed links. Links to other peers end, or linger if they are up.
  // `members`: of this epoch.
  void want(const std::map<PeerId, LinkTarget>& targets, const std::set<PeerId>& members,
            const LinkContext& context);
  // A new epoch begins. Reports of the previous epoch may have reached the master too late, so
  // faults are reported again.
  void begin_epoch(const LinkContext& context);
  // The newcomer has received another Prepare: resets has_failed for all links.
  void forget_failures();
  // This process was suspended: bytes of the other peers are still unread. Restarts all timeouts
  // for silence.
  void excuse_silence(Instant now);
  void close_all(const LinkContext& context);

  // -- connections
  // `stripe`: an id that the shell never reuses.
  void on_dialled(std::uint64_t token, std::uint64_t stripe, const Path& path,
                  const LinkContext& context) {
    handshakes_.on_dialled(token, stripe, path, context);
  }
  void on_dial_failed(std::uint64_t token, const std::string& reason, const LinkContext& context) {
    dialler_.on_dial_failed(token, reason, context);
  }
  void on_accepted(std::uint64_t stripe, const Path& path, const LinkContext& context) {
    handshakes_.on_accepted(stripe, path, context);
  }
  // The connection ended. Code::refused: the other end violated the protocol, so the whole link
  // ends.
  void on_stripe_failed(std::uint64_t stripe, const Error& error, const LinkContext& context);
  // The master offers a connection through itself.
  void on_relay(const PeerId& peer, const RelayToken& relay, const LinkContext& context) {
    dialler_.on_relay(peer, relay, context);
  }
  // The master asks whether this peer can reach an address. Answered by AddressTried.
  void try_address(std::uint64_t question, const wire::Address& address) {
    dialler_.try_address(question, address);
  }

  // -- frames
  // Handles a frame of the link itself. Nothing: the frame is the traffic's.
  [[nodiscard]] std::optional<Status> on_control(Stripe& from, const FrameHeader& header,
                                                 std::span<const std::uint8_t> payload,
                                                 const LinkContext& context);
  // True with the link's own next frame in `frame`. If there is none, `traffic_may` reports whether
  // the traffic may send a frame on this stripe.
  [[nodiscard]] bool next(Stripe& to, OutgoingFrame& frame, bool& traffic_may, Instant now);
  // Call after each complete frame: confirms received frames to the other end from time to time.
  void confirm(Stripe& stripe);
  // Returns the round-trip time. Nothing: the pong does not answer the latest ping of the link.
  [[nodiscard]] std::optional<Duration> on_pong(const PeerId& peer, const FrameHeader& header,
                                                Instant now);

  // -- time
  void on_time(const LinkContext& context);  // starts dials that are due
  void on_tick(const LinkContext& context);  // call a few times per heartbeat interval
  void on_watch(const LinkContext& context) {
    health_.on_watch(context);
  }  // call each heartbeat interval: checks links
  [[nodiscard]] Instant next_deadline(const LinkContext& context) const {
    return dialler_.next_deadline(context);
  }
  // Dials a pipe for each link for which `wanted(peer, planned)` holds.
  template <class Predicate>
  void dial_pipes(const Predicate& wanted, const LinkContext& context) {
    facts_.at = context;
    for (auto& [peer, link] : facts_.links)
      if (dialler_.may_dial_pipe(link) && wanted(peer, link.planned)) dialler_.dial_pipe(link);
  }

  // -- state
  [[nodiscard]] bool contains(const PeerId& peer) const { return facts_.links.contains(peer); }
  [[nodiscard]] bool is_up(const PeerId& peer) const override;
  [[nodiscard]] bool is_checked(const PeerId& peer) const override;
  // The link could not be established since the last Prepare, and is not up.
  [[nodiscard]] bool has_failed(const PeerId& peer) const;
  // The link is not planned, this peer dials it, and no stripe of it was ever up.
  [[nodiscard]] bool never_worked(const PeerId& peer, const LinkContext& context) const;
  // The state of all planned links, for a master that may have no reports of them.
  [[nodiscard]] std::vector<LinkStateReport> report_all(const LinkContext& context) const;
  // Null: the stripe must be closed.
  [[nodiscard]] Stripe* stripe(std::uint64_t id);
  [[nodiscard]] bool is_established(std::uint64_t id) const { return peer_of(id).has_value(); }
  // The peer at the other end; nothing until the stripe is established.
  [[nodiscard]] std::optional<PeerId> peer_of(std::uint64_t id) const;
  [[nodiscard]] std::vector<std::uint64_t> held_stripes() const;
  [[nodiscard]] std::size_t stripe_count() const { return facts_.stripes.size(); }
  // The stripe is one of the first `count` of its link. If the link has more than `spare` stripes,
  // its last `spare` do not count.
  [[nodiscard]] bool is_among_first(std::uint64_t id, std::size_t count, std::size_t spare) const;
  [[nodiscard]] std::uint64_t stand_ins() const { return stand_ins_.stand_ins(); }
  [[nodiscard]] std::uint64_t sent_again() const { return stand_ins_.sent_again(); }
  // By peer to which a link is up: its stripes, the pipe included.
  [[nodiscard]] std::vector<std::pair<PeerId, std::size_t>> stripes_by_peer() const;
  // The number of peers on this host to which a link is up.
  [[nodiscard]] std::size_t local_peers() const;
  // How often each entry of link_transitions() was taken.
  [[nodiscard]] std::span<const std::uint64_t> transitions_taken() const { return facts_.taken; }

  // -- bytes moved
  [[nodiscard]] std::vector<LinkFlow> flows();
  [[nodiscard]] std::uint64_t moved_since_last();  // over all established stripes
  void begin_probe();
  // Bytes since the previous call or begin_probe(); 0 for a pipe.
  [[nodiscard]] std::uint64_t received_since_probe(std::uint64_t id);
  void ping(const PeerId& peer);
  // The least that was seen since the link was established; 0: unknown.
  [[nodiscard]] Duration round_trip(const PeerId& peer) const;
  // A ping was answered by an idle link.
  void saw_round_trip(const PeerId& peer, Duration round_trip);

  // -- memory of operations
  void wake(const PeerId& peer) override { facts_.wake(peer); }
  std::uint64_t release(const PeerId& peer, std::uint64_t token) override;
  [[nodiscard]] std::uint64_t unsent(const PeerId& peer, std::uint64_t token) const override;

  [[nodiscard]] bool has_actions() const;
  [[nodiscard]] std::vector<LinkEvent> take_events() { return std::exchange(facts_.events, {}); }
  [[nodiscard]] LinkActions take_actions();

 private:
  LinkFacts facts_;
  Dialler dialler_{facts_};
  StandIns stand_ins_{facts_};
  Spares spares_{facts_, dialler_, stand_ins_};
  Handshakes handshakes_{facts_, dialler_, stand_ins_, spares_};
  Health health_{facts_, stand_ins_};
};

}  // namespace pccl::link
