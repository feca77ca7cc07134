// What executors and transfers use of the links between peers. The LinkTable is one; tests bring
// their own.
#pragma once

#include <cstdint>

#include "pccl/base/ids.h"

namespace pccl::link {

// *one thread: the engine's*
class Carrier {
 public:
  virtual ~Carrier() = default;
  // There may be something to send to this peer.
  virtual void wake(const PeerId& peer) = 0;
  // Stripe::release on all stripes of this peer; returns the eager bytes dropped.
  virtual std::uint64_t release(const PeerId& peer, std::uint64_t token) = 0;
  // Bytes of frames with that token that were lined up for the peer and not written whole.
  [[nodiscard]] virtual std::uint64_t unsent(const PeerId& peer, std::uint64_t token) const = 0;
  [[nodiscard]] virtual bool is_up(const PeerId& peer) const = 0;
  // Frames to this peer carry checksums.
  [[nodiscard]] virtual bool is_checked(const PeerId& peer) const = 0;
};

}  // namespace pccl::link
