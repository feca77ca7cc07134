// Stripes that end while others of their link stand in for them.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "pccl/link/link_facts.h"

namespace pccl::link {

// *one thread: the engine's*
class StandIns {
 public:
  explicit StandIns(LinkFacts& facts) : facts_(facts) {}

  // Ends a stripe. If the link keeps frames and other stripes are up, they send the frames again.
  // Otherwise the link goes down.
  void lose(std::uint64_t id, const std::string& reason);
  // The other end has lost a stripe.
  [[nodiscard]] Status on_lost(const PeerId& from, std::span<const std::uint8_t> payload);
  // Reports to the other end that the stripe has ended after `received` frames.
  void tell_lost(Link& link, std::uint32_t number, std::uint64_t received);
  [[nodiscard]] std::uint64_t stand_ins() const { return stand_ins_; }
  [[nodiscard]] std::uint64_t sent_again() const { return sent_again_; }

 private:
  [[nodiscard]] Status lost_before_it_was_up(Link& link, const Lost& lost);

  LinkFacts& facts_;
  std::uint64_t stand_ins_ = 0;
  std::uint64_t sent_again_ = 0;
};

}  // namespace pccl::link
