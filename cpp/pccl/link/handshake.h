// The handshake of a stripe. The newer of two peers sends a hello, on its own connection or on one
// that the older peer offers; the older one answers.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "pccl/link/spares.h"

namespace pccl::link {

// *one thread: the engine's*
class Handshakes {
 public:
  Handshakes(LinkFacts& facts, Dialler& dialler, StandIns& stand_ins, Spares& spares)
      : facts_(facts), dialler_(dialler), stand_ins_(stand_ins), spares_(spares) {}

  void on_dialled(std::uint64_t token, std::uint64_t stripe, const Path& path,
                  const LinkContext& context);
  void on_accepted(std::uint64_t stripe, const Path& path, const LinkContext& context);
  [[nodiscard]] Status on_greeting(StripeEntry& entry, const FrameHeader& header,
                                   std::span<const std::uint8_t> payload);
  // Goes on with a hello or an offer that was parked. REQUIRES: its sender has a link.
  void accept(StripeEntry& entry);
  // The connection ended before its handshake was over.
  void fail_handshake(StripeEntry& entry, Link& link, const std::string& reason);

 private:
  StripeEntry& add(std::uint64_t stripe, const Path& path, Way way);
  void say_hello(StripeEntry& entry, Link& link, std::uint32_t number, std::uint64_t generation);
  void greet(Stripe& stripe, FrameType type, Hello hello);  // sets its heartbeat_ms
  void offer(StripeEntry& entry, const Link& link);
  void refuse(StripeEntry& entry);
  void park(StripeEntry& entry);
  void accept_offer(StripeEntry& entry);
  void accept_hello(StripeEntry& entry);
  void establish(StripeEntry& entry);
  void bring_up(StripeEntry& entry, Link& link, bool ours);

  LinkFacts& facts_;
  Dialler& dialler_;
  StandIns& stand_ins_;
  Spares& spares_;
};

}  // namespace pccl::link
