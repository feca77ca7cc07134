// A peer's proof of identity to the master. The peer creates a secret ticket. It presents the
// ticket when it joins and when it returns on another connection. All members store the ticket's
// seal, a one-way hash.
#pragma once

#include "pccl/base/ids.h"

namespace pccl::digest {

// The first half of the ticket's SHA-256.
[[nodiscard]] Seal seal_of(const Ticket& ticket);

}  // namespace pccl::digest
