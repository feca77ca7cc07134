// Which member somebody is, shown to the master: a peer makes up a ticket, and says it to the
// master when it joins, and when it comes back on another connection. All members know its seal,
// from which nobody can make the ticket.
#pragma once

#include "pccl/base/ids.h"

namespace pccl::digest {

// The first half of the ticket's SHA-256.
[[nodiscard]] PeerId seal_of(const PeerId& ticket);

}  // namespace pccl::digest
