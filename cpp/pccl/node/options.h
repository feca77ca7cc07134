// Options of a peer's shell.
#pragma once

#include <cstdint>
#include <vector>

#include "pccl/base/settings.h"
#include "pccl/io/secret.h"
#include "pccl/peer/engine.h"
#include "pccl/wire/records.h"

namespace pccl::node {

// Refuses more addresses than a peer can have besides that of its listener.
[[nodiscard]] Status check_advertised(const std::vector<wire::Address>& addresses);

struct NodeOptions {
  std::vector<wire::Address> masters;  // the preferred one first. REQUIRES: not empty
  Settings settings;
  std::uint16_t port = 0;                // where other peers connect; 0: any free port
  std::vector<wire::Address> advertise;  // port 0: the port above
  io::Secret secret;                     // the run's; none: nothing is encrypted
};

struct RuntimeOptions : NodeOptions {
  peer::JoinOptions join;  // Runtime::open fills in the addresses
};

}  // namespace pccl::node
