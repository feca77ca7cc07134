// Asks a master, without joining, how it and the members of a run see this host.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pccl/base/settings.h"
#include "pccl/io/secret.h"
#include "pccl/wire/messages.h"

namespace pccl::node {

// One member, dialled from this host.
struct Contact {
  PeerId peer;
  std::string address;  // the one that answered; empty: none did
  std::string reason;   // why none did
};

struct Diagnosis {
  std::string failure;       // why the rest is unknown; empty: the master answered
  std::string address;       // the master's, as it was reached
  Duration round_trip{};     // the least of several questions
  std::uint16_t port = 0;    // where this host listened meanwhile; 0: it could not
  std::string port_failure;  // why it could not
  std::uint16_t asked = 0;   // the port that was reached from outside, or else the last one tried
  std::vector<std::string> untested;  // advertised addresses other than the one the master sees
  wire::Findings findings;
  std::vector<Contact> contacts;
};

// Takes some 20 s at most. `port`: where to listen; 0 takes a free one. `advertise`: where else
// others may find this host; port 0: the same. `secret`: the run's, if it has one.
[[nodiscard]] Diagnosis diagnose(const wire::Address& master, std::uint32_t group,
                                 std::uint16_t port, const std::vector<wire::Address>& advertise,
                                 const Settings& settings, const io::Secret& secret);

}  // namespace pccl::node
