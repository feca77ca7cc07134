// The connections that this peer opens: dials of a link's first stripe and of its others, pipes,
// connections through the master, and addresses that the master asks about.
#pragma once

#include <cstdint>
#include <string>

#include "pccl/link/link_facts.h"

namespace pccl::link {

// *one thread: the engine's*
class Dialler {
 public:
  explicit Dialler(LinkFacts& facts) : facts_(facts) {}

  // Dials that are due, and requests for relays.
  void dial_due();
  [[nodiscard]] Instant next_deadline(const LinkContext& context) const;
  // `offer`: the other end is to send the hello.
  void dial(Link& link, const wire::Address& address, std::uint32_t number, bool offer);
  // A link may get a pipe beside its first stripe.
  [[nodiscard]] bool may_dial_pipe(const Link& link) const;
  void dial_pipe(Link& link);
  // Dials of stripes after the first do not count any more, as they may wait for TCP's next try.
  void forget_spares(Link& link);
  void ask_for_relay(Link& link);
  void on_relay(const PeerId& peer, const RelayToken& relay, const LinkContext& context);
  void try_address(std::uint64_t question, const wire::Address& address);
  void on_dial_failed(std::uint64_t token, const std::string& reason, const LinkContext& context);

  // Dials of one generation try the addresses in parallel. After a failed handshake a new
  // generation begins, since the other end may have ended the old one.
  void begin_generation(Link& link);
  void renew_generation(Link& link) { link.generation = next_generation_++; }

 private:
  // Until the next dial to the peer, after one more.
  [[nodiscard]] Duration dial_stagger(Link& link) const;
  [[nodiscard]] Duration relay_pause() const;

  LinkFacts& facts_;
  std::uint64_t next_token_ = 1;
  std::uint64_t next_generation_ = 1;
};

}  // namespace pccl::link
