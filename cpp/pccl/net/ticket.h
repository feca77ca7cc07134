// Which member somebody is, shown to the master: a peer makes up a ticket, says its seal when it
// joins, and the ticket when it comes back on another connection. All members know the seal; nobody
// can make a ticket from it.
#pragma once

#include "pccl/base/ids.h"

namespace pccl::net {

// The first half of the ticket's SHA-256.
[[nodiscard]] PeerId seal_of(const PeerId& ticket);

}  // namespace pccl::net
