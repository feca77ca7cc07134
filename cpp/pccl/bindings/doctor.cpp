#include "pccl/node/doctor.h"

#include <array>
#include <chrono>
#include <string>
#include <vector>

#include "pccl/bindings/common.h"
#include "pccl/wire/address.h"

namespace pccl::bindings {
namespace {

constexpr std::array<const char*, 4> kReached = {"not tried", "yes", "no", "busy"};

nb::tuple to_tuple(const wire::Attempt& attempt) {
  return nb::make_tuple(attempt.peer.hex(), name_of(attempt.reached, kReached),
                        text(attempt.reason));
}

nb::dict diagnose(const std::string& master, std::uint32_t group, std::uint16_t port,
                  const std::vector<std::string>& advertise) {
  const wire::Address address = parse_address(master, wire::kDefaultPort, "doctor");
  const std::vector<wire::Address> advertised = parse_addresses(advertise, "doctor");
  const Settings settings = read_settings("doctor");
  const io::Secret secret = value_of(io::Secret::from_environment(), CallKind::connect, "doctor");
  node::Diagnosis found;
  {
    const GilRelease release;
    found = node::diagnose(address, group, port, advertised, settings, secret);
  }
  nb::list attempts;
  for (const wire::Attempt& attempt : found.findings.attempts) attempts.append(to_tuple(attempt));
  nb::list contacts;
  for (const node::Contact& contact : found.contacts)
    contacts.append(
        nb::make_tuple(contact.peer.hex(), text(contact.address), text(contact.reason)));
  nb::dict result;
  result["failure"] = text(found.failure);
  result["encrypted"] = static_cast<bool>(secret);
  result["address"] = found.address;
  result["round_trip"] = in_seconds(found.round_trip);
  result["port"] = found.port;
  result["port_failure"] = found.port_failure;
  result["asked"] = found.asked;
  result["untested"] = found.untested;
  result["software"] = text(found.findings.software);
  result["seen"] = text(found.findings.seen);
  result["master_reached_us"] = to_tuple(found.findings.attempt);
  result["members_reached_us"] = attempts;
  result["we_reached_members"] = contacts;
  result["size"] = found.findings.size;
  result["relays"] = found.findings.relays;
  return result;
}

}  // namespace

void bind_doctor(nb::module_& m) {
  m.def("diagnose", &diagnose, "master"_a, "group"_a, "port"_a, "advertise"_a);
}

}  // namespace pccl::bindings
