#include "pccl/bindings/communicator.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "pccl/base/name.h"
#include "pccl/bindings/operation.h"
#include "pccl/topology/plan.h"
#include "pccl/wire/address.h"

namespace pccl::bindings {

CommunicatorHandle::~CommunicatorHandle() {
  if (engine->inert()) {
    // A forked copy: no thread of this process writes the arrays.
    engine.reset();
    return;
  }
  {
    const GilRelease release;
    engine->close();  // no array is used after this
    engine.reset();
  }
  kept.clear();
}

void CommunicatorHandle::keep(peer::CallPtr call, Arrays arrays) {
  kept.emplace_back(std::move(call), std::move(arrays));
}

void CommunicatorHandle::drop_finished() {
  const auto done = [](const auto& item) {
    return item.first->done.load(std::memory_order_acquire);
  };
  while (!kept.empty() && done(kept.front())) kept.pop_front();
  // Most operations end in their order. Look for others when half of those kept may have ended.
  if (kept.size() < look_again) return;
  kept.remove_if(done);
  look_again = 2 * kept.size() + 16;
}

namespace {

// (id, reason, name) of each.
nb::list departures_of(const node::Statistics& known) {
  nb::list gone;
  for (const wire::Departure& departure : known.departures)
    gone.append(nb::make_tuple(departure.id.hex(), text(departure.reason), text(departure.name)));
  return gone;
}

// Returns the result of `make`, which calls the function. The result is invalid after an exception,
// which goes to sys.unraisablehook, or to `signals` if no program is meant to catch it.
template <class Make>
nb::object call_or_report(nb::handle function, Signals& signals, const Make& make) {
  try {
    return make();
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) {
      signals.keep(std::move(error));
      return {};
    }
    error.restore();
  }
  run_python([&] { PyErr_WriteUnraisable(function.ptr()); });
  return {};
}

}  // namespace

void CommunicatorHandle::tell_changes(Signals& signals) {
  const std::uint64_t epoch = engine->seen_epoch();
  if (epoch == notified_epoch) return;
  notified_epoch = epoch;  // first: on_change may make calls
  const auto known = [&] {
    const GilRelease release;
    return std::pair(engine->view(), engine->statistics());
  }();
  if (!known.first || !known.second) return;  // closed meanwhile
  const auto& record = known.first->record;
  int rank = -1;
  for (std::size_t i = 0; i < record->members.size(); ++i)
    if (record->members[i].id == engine->id()) rank = static_cast<int>(i);
  std::vector<std::string> names;
  for (const wire::Member& member : record->members)
    names.push_back(wire::shown_name(record->members, member.id));
  const nb::object tell = on_change.get();  // a callback may set another one
  const Held callbacks(call_or_report(tell, signals, [&] {
    return call(tell, record->epoch, rank, ids_of(record), texts(names),
                departures_of(*known.second));
  }));
  if (!callbacks.get().is_valid()) return;
  for (const nb::handle callback : nb::cast<nb::list>(callbacks.get()))
    const Held dropped(call_or_report(callback, signals, [&] { return call(callback); }));
}

std::vector<std::string> ids_of(const peer::Record& record) {
  std::vector<std::string> ids;
  if (record != nullptr) {
    for (const wire::Member& member : record->members) ids.push_back(member.id.hex());
  }
  return ids;
}

namespace {

// The functions of pccl._threads, which numbers the program's threads.
struct Threads {
  nb::object current = nb::module_::import_("pccl._threads").attr("current");
  nb::object ended = nb::module_::import_("pccl._threads").attr("ended");
};

void know_threads(node::CommunicatorOptions& options) {
  const auto& known = immortal<Threads>();
  options.thread = [&known] {
    const GilAcquire gil;
    return nb::cast<std::uint64_t>(call(known.current));
  };
  options.ended = [&known](std::uint64_t thread) {
    const GilAcquire gil;
    return nb::cast<bool>(call(known.ended, thread));
  };
}

std::shared_ptr<CommunicatorHandle> make(const std::string& master, std::uint32_t peer_group,
                                         unsigned stripes, std::uint16_t port,
                                         const std::vector<std::string>& advertise,
                                         const std::string& replica,
                                         std::uint32_t ranks_per_replica, const std::string& name,
                                         const io::Secret* secret, bool quiet) {
  const char* function = "Communicator";
  node::CommunicatorOptions options;
  options.settings = read_settings(function);
  options.masters =
      value_of(wire::parse_masters(master, wire::kDefaultPort), CallKind::collective, function);
  options.group = peer_group;
  options.replica = replica;
  options.ranks_per_replica = ranks_per_replica;
  options.name = name;
  options.quiet = quiet;
  if (secret != nullptr) options.secret = *secret;
  options.port = port;
  know_threads(options);
  if (stripes > 255) refuse(function, "at most 255 connections per link");
  if (stripes != 0) options.settings.stripes = stripes;
  options.advertise = parse_addresses(advertise, function);
  return std::make_shared<CommunicatorHandle>(std::move(options));
}

// A method of the engine that takes nothing but a limit.
template <auto kMethod>
auto method(CallKind kind, const char* function) {
  return [kind, function](CommunicatorHandle& comm, Seconds timeout) {
    return block(comm, timeout, kind, function,
                 [](auto& engine, const node::Limit& limit) { return (engine.*kMethod)(limit); });
  };
}

node::View view_of(const CommunicatorHandle& comm, const char* function) {
  return value_of(comm.engine->view(), CallKind::question, function);
}

// (epoch, own rank, members, their ids, group, their replicas)
nb::tuple membership(const CommunicatorHandle& comm) {
  const node::View view = view_of(comm, "membership");
  nb::list replicas;
  int rank = -1;
  std::uint64_t epoch = 0;
  if (view.record != nullptr) {
    epoch = view.record->epoch;
    const auto& members = view.record->members;
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (members[i].id == comm.engine->id()) rank = static_cast<int>(i);
      if (!members[i].replica.empty()) replicas.append(text(members[i].replica));
    }
  }
  const std::vector<std::string> ids = ids_of(view.record);
  return nb::make_tuple(epoch, rank, ids.size(), ids, comm.engine->group(), replicas);
}

std::vector<std::string> present(const CommunicatorHandle& comm) {
  return ids_of(value_of(comm.engine->newest(), CallKind::question, "present"));
}

// See pccl.types.RunStats; times in seconds.
nb::dict stats(const CommunicatorHandle& comm) {
  const auto engine = comm.engine;
  const auto found = [&] {
    const GilRelease release;
    return engine->statistics();
  }();
  if (!found) raise(found.error(), CallKind::question, "stats");
  const peer::Totals& totals = found->totals;
  nb::dict out;
  out["operations"] = totals.operations;
  out["aborted"] = totals.aborted;
  out["reruns"] = totals.reruns;
  out["reduced_bytes"] = totals.reduced_bytes;
  out["sent_bytes"] = totals.sent_bytes;
  out["received_bytes"] = totals.received_bytes;
  out["unencoded_bytes"] = totals.sent_bytes + totals.saved_bytes;
  out["seconds"] = in_seconds(totals.spent.total());
  out["waiting_seconds"] = in_seconds(totals.spent.waiting);
  out["moving_seconds"] = in_seconds(totals.spent.moving);
  out["deciding_seconds"] = in_seconds(totals.spent.deciding);
  out["joined"] = found->joined;
  out["lost"] = found->lost;
  nb::dict links;
  for (const auto& [peer, count] : found->stripes) links[nb::str(peer.hex().c_str())] = count;
  out["stripes"] = links;
  return out;
}

// `callback`: see CommunicatorHandle::on_change; None for none.
void on_change(CommunicatorHandle& comm, nb::object callback) {
  comm.notified_epoch = comm.engine->seen_epoch();
  comm.on_change = Held(callback.is_none() ? nb::object() : std::move(callback));
}

// The network as measured, and the plan made from it: the members in rank order; kB/s up and down
// for each; for each ordered pair whether it is unreachable, kB/s, and the round trip in
// microseconds; the ring; the size classes; each member's host and region; the links of the plan
// that go through the master.
nb::tuple topology_of(const CommunicatorHandle& comm) {
  const node::View view = view_of(comm, "topology");
  const wire::EpochRecord none{};
  const wire::EpochRecord& record = view.record == nullptr ? none : *view.record;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> rates;
  for (const wire::HostRate& rate : record.rates.hosts)
    rates.emplace_back(rate.up_kilobytes_per_s, rate.down_kilobytes_per_s);
  std::vector<std::tuple<bool, std::uint32_t, std::uint32_t>> links;
  for (const wire::LinkRate& rate : record.rates.links)
    links.emplace_back(rate.unreachable, rate.kilobytes_per_s, rate.rtt_us);
  std::vector<std::tuple<std::uint64_t, int, std::vector<std::uint32_t>>> classes;
  for (const wire::SizeClass& size : record.plan.classes)
    classes.emplace_back(size.max_bytes, static_cast<int>(size.kind), size.shares);
  std::vector<topology::Edge> relayed;
  const std::set<topology::Edge> used = topology::edges(record.plan);
  for (const auto& [a, b] : record.relayed)
    if (used.contains({a, b})) relayed.emplace_back(a, b);
  return nb::make_tuple(ids_of(view.record), rates, links, record.plan.order, classes,
                        record.plan.hosts, record.plan.regions, relayed);
}

std::uint64_t attribute(const CommunicatorHandle& comm, int which) {
  const node::View view = view_of(comm, "get_attribute");
  switch (which) {  // pccl.types.Attribute
    case 1:
      return view.census.members;
    case 2:
      return view.record == nullptr ? 0 : view.record->members.size();
    case 3:
      return view.census.groups;
    case 4:
      return view.census.largest_group;
    default:
      raise({Code::invalid_argument, "no such attribute"}, CallKind::question, "get_attribute");
  }
}

}  // namespace

void bind_communicator(nb::module_& m) {
  using Engine = node::Communicator;
  const auto timeout = nb::arg("timeout").none();
  m.attr("NAMES") = kNameRule;
  m.def(
      "is_name", [](const std::string& text) { return valid_name(text); }, "text"_a);
  m.def(
      "check_settings",
      [](const std::string& function) { std::ignore = read_settings(function.c_str()); },
      "function"_a);
  m.def(
      "check_advertised",
      [](const std::vector<std::string>& addresses, const std::string& function) {
        const char* name = function.c_str();
        const Status fits = node::check_advertised(parse_addresses(addresses, name));
        if (!fits) raise(fits.error(), CallKind::collective, name);
      },
      "addresses"_a, "function"_a);
  nb::class_<CommunicatorHandle> communicator(m, "Communicator");
  bind_sync(m, communicator);
  communicator
      .def(nb::new_(&make), "master"_a, nb::kw_only(), "peer_group"_a, "stripes"_a, "port"_a,
           "advertise"_a, "replica"_a = "", "ranks_per_replica"_a = 0, "name"_a = "",
           nb::arg("secret").none() = nb::none(), "quiet"_a = false)
      .def(
          "join",
          [](CommunicatorHandle& comm, std::uint32_t min_peers, unsigned attempts, Seconds seconds,
             bool enter) {
            block(comm, seconds, CallKind::connect, enter ? "connect" : "init",
                  [&](auto& engine, const auto& limit) {
                    return engine.join({min_peers, attempts, enter}, limit);
                  });
          },
          nb::kw_only(), "min_peers"_a, "attempts"_a, nb::arg("timeout").none(), "enter"_a)
      .def("admit", method<&Engine::admit>(CallKind::topology, "admit"), timeout)
      .def("settle", method<&Engine::settle>(CallKind::topology, "drain"), timeout)
      .def("update_topology",
           method<&Engine::update_topology>(CallKind::topology, "update_topology"), timeout)
      .def("peers_pending", method<&Engine::peers_pending>(CallKind::question, "are_peers_pending"),
           timeout)
      .def("barrier", method<&Engine::barrier>(CallKind::collective, "barrier"), timeout)
      .def("optimize_topology",
           method<&Engine::optimize>(CallKind::collective, "optimize_topology"), timeout)
      .def("start", &start_operation, "arrays"_a, nb::kw_only(), "op"_a, nb::arg("tag").none(),
           "level"_a, "rerun"_a, "structure"_a, "description"_a, nb::arg("timeout").none(),
           "kind"_a = 0, "root"_a = 0, "parts"_a = 0, nb::arg("quantize").none() = nb::none(),
           "residuals"_a = nb::tuple(), "residual_members"_a = 0, "any_thread"_a = false,
           "wait"_a = false, "kept"_a = nb::none())
      .def("reduce_tree", &reduce_tree, nb::arg("tree").none(), nb::arg("out").none(),
           nb::arg("op").none(), nb::arg("tag").none(), nb::arg("timeout").none(),
           nb::arg("coding").none())
      .def("start_tree", &start_tree, nb::arg("tree").none(), nb::arg("out").none(),
           nb::arg("op").none(), nb::arg("tag").none(), nb::arg("timeout").none(),
           nb::arg("coding").none())
      .def("collect", &collect, nb::kw_only(), "kind"_a, "level"_a, nb::arg("array").none(),
           nb::arg("out").none(), "op"_a, nb::arg("root").none(), nb::arg("tag").none(),
           nb::arg("timeout").none())
      .def("topology", &topology_of)
      .def("membership", &membership)
      .def("present", &present)
      .def("stats", &stats)
      .def("on_change", &on_change, nb::arg("callback").none())
      .def("attribute", &attribute, "which"_a)
      .def("unfinished", [](const CommunicatorHandle& comm) { return comm.engine->unfinished(); })
      .def("name", [](const CommunicatorHandle& comm) { return comm.engine->name(); })
      .def("drain",
           [](const CommunicatorHandle& comm) {
             const std::shared_ptr<node::Communicator> engine = comm.engine;
             const GilRelease release;
             engine->drain();
           })
      .def(
          "expect_operation",
          [](const CommunicatorHandle& comm, double seconds, std::uint64_t nbytes, bool quantized) {
            const std::shared_ptr<node::Communicator> engine = comm.engine;
            const auto in =
                std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
            const GilRelease release;
            engine->expect_operation(in, {nbytes, quantized});
          },
          "seconds"_a, "nbytes"_a, "quantized"_a)
      .def(
          "wait_no_longer_than",
          [](const CommunicatorHandle& comm, std::uint16_t quorum, std::uint32_t grace_ms) {
            const std::shared_ptr<node::Communicator> engine = comm.engine;
            const GilRelease release;
            engine->wait_no_longer_than({quorum, grace_ms});
          },
          "quorum"_a, "grace_ms"_a)
      // With the GIL: no thread may meanwhile see that its call has ended.
      .def(
          "end_process",
          [](const CommunicatorHandle& comm, const std::string& failure, int signal) {
            comm.engine->close(failure);
            std::signal(signal, SIG_DFL);  // which Python allows in its main thread only
            ::kill(::getpid(), signal);
          },
          "failure"_a, "signal"_a)
      .def("draining", [](const CommunicatorHandle& comm) { return comm.engine->draining(); })
      .def("peer_id", [](const CommunicatorHandle& comm) { return comm.engine->id().hex(); })
      .def("is_open", [](const CommunicatorHandle& comm) { return comm.engine->is_open(); })
      .def(
          "close",
          [](CommunicatorHandle& comm, const std::string& failure) {
            const std::shared_ptr<node::Communicator> engine = comm.engine;
            {
              const GilRelease release;
              engine->close(failure);
            }
            comm.drop_finished();
          },
          "failure"_a = "");
}

}  // namespace pccl::bindings
