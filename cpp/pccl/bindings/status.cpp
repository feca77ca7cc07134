#include "pccl/bindings/status.h"

#include <array>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "pccl/node/visitor.h"
#include "pccl/wire/address.h"

namespace pccl::bindings {
namespace {

double seconds(std::uint64_t ms) { return static_cast<double>(ms) / 1000; }

template <class Item>
nb::list list_of(const std::vector<Item>& items, nb::dict (*convert)(const Item&)) {
  nb::list list;
  for (const Item& item : items) list.append(convert(item));
  return list;
}

nb::dict dict_of(const wire::WaitStatus& wait) {
  nb::dict dict;
  dict["call"] = text(wait.call);
  dict["seconds"] = seconds(wait.for_ms);
  return dict;
}

nb::dict dict_of(const wire::MemberStatus& member) {
  const auto per_s = [&](std::uint64_t added) {
    return member.recent_ms == 0 ? 0 : static_cast<double>(added) / seconds(member.recent_ms);
  };
  nb::dict dict;
  dict["name"] = text(member.name);
  dict["id"] = member.id.hex();
  dict["host"] = member.host;
  dict["address"] = text(member.address);
  dict["software"] = text(member.software);
  dict["seconds"] = seconds(member.member_ms);
  dict["heard_seconds"] = seconds(member.heard_ms);
  dict["connected"] = member.connected;
  dict["draining"] = member.draining;
  dict["replica"] = text(member.replica);
  dict["behind"] = member.behind;
  dict["waits"] = list_of<wire::WaitStatus>(member.waits, &dict_of);
  dict["operations"] = member.totals.operations;
  dict["reduced_bytes"] = member.totals.reduced_bytes;
  dict["sent_bytes"] = member.totals.sent_bytes;
  dict["received_bytes"] = member.totals.received_bytes;
  dict["operations_per_s"] = per_s(member.recent.operations);
  dict["reduced_bytes_per_s"] = per_s(member.recent.reduced_bytes);
  dict["sent_bytes_per_s"] = per_s(member.recent.sent_bytes);
  dict["received_bytes_per_s"] = per_s(member.recent.received_bytes);
  return dict;
}

nb::dict dict_of(const wire::NewcomerStatus& newcomer) {
  nb::dict dict;
  dict["name"] = text(newcomer.name);
  dict["id"] = newcomer.id.hex();
  dict["address"] = text(newcomer.address);
  dict["seconds"] = seconds(newcomer.joined_ms);
  dict["state"] = name_of(newcomer.state, std::array{"joined", "asks", "connects", "ready"});
  dict["without"] = texts(newcomer.without);
  return dict;
}

nb::dict dict_of(const wire::CallStatus& call) {
  nb::dict dict;
  dict["call"] = text(call.call);
  dict["what"] = text(call.what);
  dict["seconds"] = seconds(call.open_ms);
  dict["entered"] = call.entered;
  dict["missing"] = call.missing;
  return dict;
}

nb::dict dict_of(const wire::LinkStatus& link) {
  const auto known = [](double value) {
    return value == 0 ? nb::object(nb::none()) : nb::object(nb::float_(value));
  };
  nb::dict dict;
  dict["from"] = link.from;
  dict["to"] = link.to;
  dict["bytes_per_s"] = known(1000.0 * link.rate.kilobytes_per_s);
  dict["rtt_seconds"] = known(link.rate.rtt_us / 1e6);
  dict["state"] = name_of(
      link.condition, std::array{"ok", "relayed", "avoided", "unreachable", "silent", "broken"});
  dict["reason"] = text(link.reason);
  return dict;
}

nb::dict dict_of(const wire::PlanStatus& plan) {
  nb::list classes;
  for (const wire::SizeClass& size : plan.classes) {
    const bool unlimited = size.max_bytes == std::numeric_limits<std::uint64_t>::max();
    nb::dict one;
    one["max_bytes"] = unlimited ? nb::object(nb::none()) : nb::object(nb::int_(size.max_bytes));
    one["kind"] =
        name_of(size.kind, std::array{"ring", "direct", "host_ring", "host_direct", "regional"});
    classes.append(one);
  }
  nb::dict dict;
  dict["why"] = text(plan.why);
  dict["segment_bytes"] = plan.segment_bytes;
  dict["classes"] = classes;
  return dict;
}

nb::dict dict_of(const wire::GroupStatus& group) {
  nb::list members;
  std::uint32_t rank = 0;
  for (const wire::MemberStatus& member : group.members) {
    nb::dict one = dict_of(member);
    one["rank"] = rank++;
    members.append(one);
  }
  nb::dict dict;
  dict["group"] = group.group;
  dict["epoch"] = group.epoch;
  dict["epoch_seconds"] = seconds(group.epoch_ms);
  dict["cause"] = name_of(group.cause, std::array{"admission", "loss", "plan"});
  dict["min_peers"] = group.min_peers;
  dict["missing"] = group.missing;
  dict["members"] = members;
  dict["newcomers"] = list_of<wire::NewcomerStatus>(group.newcomers, &dict_of);
  dict["calls"] = list_of<wire::CallStatus>(group.calls, &dict_of);
  dict["links"] = list_of<wire::LinkStatus>(group.links, &dict_of);
  dict["plan"] = dict_of(group.plan);
  dict["operations"] = group.operations;
  dict["aborted"] = group.aborted;
  return dict;
}

nb::dict dict_of(const wire::EventStatus& event) {
  nb::dict dict;
  dict["seconds_ago"] = seconds(event.ago_ms);
  dict["level"] = event.warning ? "warn" : "info";
  dict["group"] = event.of_group ? nb::object(nb::int_(event.group)) : nb::object(nb::none());
  dict["epoch"] = event.of_group ? nb::object(nb::int_(event.epoch)) : nb::object(nb::none());
  dict["text"] = text(event.text);
  return dict;
}

nb::dict ask_status(const std::string& address, const io::Secret* given) {
  const char* function = "ask_status";
  const wire::Address master = parse_address(address, wire::kDefaultPort, function);
  const Settings settings = read_settings(function);
  const io::Secret secret =
      given != nullptr ? *given
                       : value_of(io::Secret::from_environment(), CallKind::connect, function);
  Result<wire::RunStatus> status = [&] {
    const GilRelease release;
    return node::ask_status(master, settings, secret);
  }();
  return to_dict(value_of(std::move(status), CallKind::connect, function));
}

std::string command(const std::string& address, const std::string& kind, const std::string& name) {
  const char* function = "command";
  constexpr std::array kKinds{"kick", "drain", "pause-admission", "resume-admission"};
  static_assert(kKinds.size() == enum_count(wire::CommandKind{}));
  wire::Command wanted{wire::CommandKind::kick, name};
  std::size_t number = 0;
  while (number < kKinds.size() && kind != kKinds[number]) ++number;
  if (number == kKinds.size()) refuse(function, "there is no command \"" + kind + "\"");
  wanted.kind = static_cast<wire::CommandKind>(number);
  const wire::Address master = parse_address(address, wire::kDefaultPort, function);
  const Settings settings = read_settings(function);
  const io::Secret secret = value_of(io::Secret::from_environment(), CallKind::connect, function);
  Result<std::string> result = [&] {
    const GilRelease release;
    return node::command(master, wanted, settings, secret);
  }();
  return value_of(std::move(result), CallKind::connect, function);
}

}  // namespace

nb::dict to_dict(const wire::RunStatus& status) {
  std::array<char, 17> run{};
  (void)std::snprintf(run.data(), run.size(), "%016llx",
                      static_cast<unsigned long long>(status.run));
  nb::dict dict;
  dict["software"] = text(status.software);
  dict["run"] = run.data();
  dict["term"] = status.term;
  dict["seconds"] = seconds(status.master_ms);
  dict["encrypted"] = status.encrypted;
  dict["relays"] = status.relays;
  dict["admission_paused"] = status.admission_paused;
  dict["evictions"] = status.evictions;
  dict["restarts"] = status.term > 0 ? status.term - 1 : 0;
  dict["groups"] = list_of<wire::GroupStatus>(status.groups, &dict_of);
  dict["groups_left_out"] = status.left_out;
  dict["events"] = list_of<wire::EventStatus>(status.events, &dict_of);
  return dict;
}

void bind_status(nb::module_& m) {
  m.def("ask_status", &ask_status, "address"_a, "secret"_a.none() = nb::none());
  m.def("command", &command, "address"_a, "kind"_a, "name"_a = "");
}

}  // namespace pccl::bindings
