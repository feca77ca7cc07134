// The links between peers, as executors and transfers use them. Implemented by LinkTable and by
// tests.
#pragma once

#include <cstdint>

#include "pccl/base/ids.h"

namespace pccl::link {

// *one thread: the engine's*
class Carrier {
 public:
  virtual ~Carrier() = default;
  // There may be frames to send to this peer.
  virtual void wake(const PeerId& peer) = 0;
  // Stripe::release on all stripes of this peer; returns the eager bytes dropped.
  virtual std::uint64_t release(const PeerId& peer, std::uint64_t token) = 0;
  // Payload bytes of frames with that token that are queued for the peer and not completely
  // written.
  [[nodiscard]] virtual std::uint64_t unsent(const PeerId& peer, std::uint64_t token) const = 0;
  [[nodiscard]] virtual bool is_up(const PeerId& peer) const = 0;
  // Frames to this peer carry checksums.
  [[nodiscard]] virtual bool is_checked(const PeerId& peer) const = 0;
};

}  // namespace pccl::link
