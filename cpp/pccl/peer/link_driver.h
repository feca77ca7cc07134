// Connects the links and the neighbours with the other parts of the engine: chooses those that are
// needed, and brings events and frames to the parts that they concern. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "pccl/peer/measuring.h"
#include "pccl/peer/operations.h"
#include "pccl/peer/sync_call.h"

namespace pccl::peer {

// *one thread: the engine's*
class LinkDriver final : public link::Traffic {
 public:
  struct Parts {
    Session& session;
    Admission& admission;
    Locality& locality;
    Operations& operations;
    SyncCall& sync;
    Measuring& measuring;
    EngineActions& actions;
    Tracer& tracer;
    const Instant& now;  // of the event that is being handled
  };
  LinkDriver(link::LinkTable& links, const Parts& parts) : links_(links), parts_(parts) {}

  [[nodiscard]] link::LinkContext context() const;

  // -- events of the parts. Call each after every use of its part that may produce events.
  void handle_links();
  void handle_locality();
  void handle_sync();
  void handle_measuring();

  // Determines which links and neighbours are needed. Call after every change of what needs them.
  void choose();
  // Dials pipes to the neighbours that have become reachable, where links to them carry much: if
  // some members are on other hosts, and in transfers of a state.
  void dial_pipes();
  void begin_epoch();
  // Closes all links for good. Later connections are closed at once.
  void close();

  // -- messages from the master
  void on_prepare();  // after Admission::on_prepare has accepted it
  void on_relay(const wire::Relay& relay);
  void on_try(const wire::Try& question);

  // -- events of connections, from the shell
  // `stripe` is an id that the shell never uses again.
  void on_dialled(std::uint64_t token, std::uint64_t stripe, const link::Path& path);
  void on_dial_failed(std::uint64_t token, const std::string& reason);
  void on_accepted(std::uint64_t stripe, const link::Path& path);
  // The connection ended, or Stripe::received or resume failed. Other stripes of the link take over
  // where they can. Code::refused: the other end misbehaves, and the link ends.
  void on_stripe_failed(std::uint64_t stripe, const Error& error);

  // -- events of neighbours, from the shell: see node::NeighbourEvents. on_neighbour_offer and
  // on_neighbour_unmapped may also be called from inside LocalityOptions::poll.
  void on_neighbour_up(const PeerId& peer);
  void on_neighbour_down(const PeerId& peer, const std::string& reason);
  void on_neighbour_offer(const PeerId& peer, memory::Offer what, std::uint64_t number,
                          const memory::RegionPtr& region);
  void on_neighbour_unmapped(const PeerId& peer, memory::Offer what, std::uint64_t number,
                             const std::string& reason);

  // -- link::Traffic
  link::Placement place(link::Stripe& from, const link::FrameHeader& header) override;
  Status arrived(link::Stripe& from, const link::FrameHeader& header, std::uint64_t token,
                 Buffer buffer) override;
  void voided(link::Stripe& from, const link::FrameHeader& header, std::uint64_t token) override;
  void drained(link::Stripe& from, const link::FrameHeader& header) override;
  void interrupted(link::Stripe& from, const link::FrameHeader& header,
                   std::uint64_t token) override;
  Status control(link::Stripe& from, const link::FrameHeader& header,
                 std::span<const std::uint8_t> payload) override;
  bool next(link::Stripe& to, link::OutgoingFrame& frame) override;

 private:
  [[nodiscard]] const Record& record() const { return parts_.session.record(); }
  [[nodiscard]] std::map<PeerId, link::LinkTarget> targets() const;
  void choose_neighbours();
  void on_link_up(const PeerId& peer);
  void on_link_down(const link::LinkDown& down);
  void on_link_failed(const link::LinkFailed& failed);

  link::LinkTable& links_;
  Parts parts_;
  bool closed_ = false;
  Instant pipes_from_{};  // no pipes for operations before
};

}  // namespace pccl::peer
