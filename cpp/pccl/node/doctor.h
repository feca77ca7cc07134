// Asks a master, before anything is joined, what it and the members of a run see of this host.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/base/settings.h"
#include "pccl/io/secret.h"
#include "pccl/wire/messages.h"

namespace pccl::node {

// One member, dialled from here.
struct Contact {
  PeerId peer;
  std::string address;  // that answered; empty: none did
  std::string reason;   // why not
};

struct Diagnosis {
  std::string failure;       // why nothing more is known; empty: there was a master
  std::string address;       // of the master, as it was reached
  Duration round_trip{};     // of a question and its answer, the least of several
  std::uint16_t port = 0;    // at which this host listened meanwhile; 0: it could not
  std::string port_failure;  // why not
  std::uint16_t asked = 0;   // of the ports tried from outside: that was reached, or the last one
  std::vector<std::string> untested;  // advertised addresses that are not the one the master sees
  wire::Findings findings;
  std::vector<Contact> contacts;
};

// Takes some 20 s at most. `port`: where to listen; 0 takes a free one. `advertise`: where else
// others may find this host; port 0: the same. `secret`: the run's, if it has one.
[[nodiscard]] Diagnosis diagnose(const wire::Address& master, std::uint32_t group,
                                 std::uint16_t port, const std::vector<wire::Address>& advertise,
                                 const Settings& settings, const io::Secret& secret);

}  // namespace pccl::node
