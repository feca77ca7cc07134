// Sums over the calls of this peer that have ended.
#pragma once

#include <cstdint>

namespace pccl::peer {

// Since this communicator joined. Operations are collectives on arrays; rounds, such as a barrier,
// are not counted.
struct Totals {
  std::uint64_t operations = 0;  // committed
  std::uint64_t aborted = 0;     // operations that ended otherwise
  // Bytes of the arrays of committed operations: of the elements that this member passes, and in a
  // broadcast of those that it receives.
  std::uint64_t reduced_bytes = 0;
  // Payload of operations and syncs that have ended, also of attempts that were lost, to and from
  // other members: over links, and through shared memory.
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

}  // namespace pccl::peer
