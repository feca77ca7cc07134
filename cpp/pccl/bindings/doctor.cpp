#include "pccl/node/doctor.h"

#include <nanobind/stl/vector.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "pccl/bindings/common.h"
#include "pccl/io/address.h"

namespace pccl::bindings {
namespace {

const char* name(wire::Reached reached) {
  switch (reached) {
    case wire::Reached::not_tried:
      return "not tried";
    case wire::Reached::yes:
      return "yes";
    case wire::Reached::no:
      return "no";
    case wire::Reached::busy:
      break;
  }
  return "busy";
}

nb::tuple told(const wire::Attempt& attempt) {
  return nb::make_tuple(attempt.peer.hex(), name(attempt.reached), attempt.reason);
}

nb::dict diagnose(const std::string& master, std::uint32_t group, std::uint16_t port,
                  const std::vector<std::string>& advertise) {
  const auto parse = [](const std::string& text, std::uint16_t default_port) {
    auto parsed = wire::parse_address(text, default_port);
    if (!parsed) raise(parsed.error(), CallKind::connect, "doctor");
    return std::move(*parsed);
  };
  const wire::Address address = parse(master, wire::kDefaultPort);
  std::vector<wire::Address> advertised;
  for (const std::string& text : advertise) advertised.push_back(parse(text, 0));
  const Settings settings = read_settings("doctor");
  const Result<io::Secret> secret = io::Secret::from_environment();
  if (!secret) raise(secret.error(), CallKind::connect, "doctor");
  node::Diagnosis found;
  {
    const GilRelease release;
    found = node::diagnose(address, group, port, advertised, settings, *secret);
  }
  nb::list attempts;
  for (const wire::Attempt& attempt : found.findings.attempts) attempts.append(told(attempt));
  nb::list contacts;
  for (const node::Contact& contact : found.contacts)
    contacts.append(nb::make_tuple(contact.peer.hex(), contact.address, contact.reason));
  nb::dict result;
  result["failure"] = found.failure;
  result["encrypted"] = static_cast<bool>(*secret);
  result["address"] = found.address;
  result["round_trip"] = std::chrono::duration<double>(found.round_trip).count();
  result["port"] = found.port;
  result["port_failure"] = found.port_failure;
  result["asked"] = found.asked;
  result["untested"] = found.untested;
  result["software"] = found.findings.software;
  result["seen"] = found.findings.seen;
  result["master_reached_us"] = told(found.findings.attempt);
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
