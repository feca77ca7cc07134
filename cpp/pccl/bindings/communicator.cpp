#include "pccl/bindings/communicator.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "pccl/bindings/operation.h"
#include "pccl/bindings/reducer.h"
#include "pccl/io/address.h"
#include "pccl/topology/plan.h"

namespace pccl::bindings {

Comm::~Comm() {
  if (engine->inert()) {
    // A forked copy: the arrays may be half-written, but nobody writes them any more.
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

void Comm::keep(peer::CallPtr call, Arrays arrays) {
  kept.emplace_back(std::move(call), std::move(arrays));
}

void Comm::drop_finished() {
  const auto done = [](const auto& item) {
    return item.first->done.load(std::memory_order_acquire);
  };
  while (!kept.empty() && done(kept.front())) kept.pop_front();
  // Most end in the order in which they began. The others are looked for when they may be half.
  if (kept.size() < look_again) return;
  kept.remove_if(done);
  look_again = 2 * kept.size() + 16;
}

namespace {

wire::Address parse(const std::string& text, std::uint16_t default_port, const char* function) {
  auto address = wire::parse_address(text, default_port);
  if (!address) raise(address.error(), CallKind::collective, function);
  if (address->host.empty()) {
    raise({Code::invalid_argument, "\"" + text + "\" names no host", {}, {}}, CallKind::collective,
          function);
  }
  return *address;
}

// Which of the program's threads calls, as pccl._threads knows them. Never freed: the interpreter
// may be gone before static objects are.
struct Threads {
  nb::object current = nb::module_::import_("pccl._threads").attr("current");
  nb::object ended = nb::module_::import_("pccl._threads").attr("ended");
};

void know_threads(node::CommunicatorOptions& options) {
  static const Threads* threads = nullptr;  // guarded by the GIL
  if (threads == nullptr) threads = new Threads;
  const Threads& known = *threads;
  options.thread = [&known] {
    const GilAcquire gil;
    return nb::cast<std::uint64_t>(known.current());
  };
  options.ended = [&known](std::uint64_t thread) {
    const GilAcquire gil;
    return nb::cast<bool>(known.ended(thread));
  };
}

std::shared_ptr<Comm> make(const std::string& master, std::uint32_t peer_group, unsigned stripes,
                           std::uint16_t port, const std::vector<std::string>& advertise,
                           const std::string& replica, std::uint32_t ranks_per_replica,
                           const io::Secret* secret) {
  const char* function = "Communicator";
  node::CommunicatorOptions options;
  options.settings = read_settings(function);
  options.master = parse(master, wire::kDefaultPort, function);
  options.group = peer_group;
  options.replica = replica;
  options.ranks_per_replica = ranks_per_replica;
  if (secret != nullptr) options.secret = *secret;
  options.port = port;
  know_threads(options);
  if (stripes > 255) {
    raise({Code::invalid_argument, "at most 255 connections per link", {}, {}},
          CallKind::collective, function);
  }
  if (stripes != 0) options.settings.stripes = stripes;
  for (const std::string& text : advertise) options.advertise.push_back(parse(text, 0, function));
  return std::make_shared<Comm>(std::move(options));
}

// Runs a blocking call without the GIL; a signal handler's exception wins over the call's own
// result.
template <class Call>
auto block(const Comm& comm, const Seconds& timeout, CallKind kind, const char* function,
           const Call& call) {
  Signals signals;
  const node::Limit limit{duration(timeout), signals.hook()};
  const std::shared_ptr<node::Communicator> engine = comm.engine;
  auto result = [&] {
    const GilRelease release;
    return call(*engine, limit);
  }();
  signals.rethrow();
  if (!result) raise(result.error(), kind, function);
  if constexpr (!std::is_same_v<decltype(result), Status>) return *result;
}

std::tuple<std::uint64_t, int, std::size_t, std::vector<std::string>, std::uint32_t,
           std::vector<std::string>>
membership(const Comm& comm) {
  const Result<node::View> view = comm.engine->view();
  if (!view) raise(view.error(), CallKind::question, "membership");
  std::vector<std::string> peers;
  std::vector<std::string> replicas;
  int rank = -1;
  if (view->record == nullptr) return {0, rank, 0, peers, comm.engine->group(), replicas};
  for (const wire::Member& member : view->record->members) {
    if (member.id == comm.engine->id()) rank = static_cast<int>(peers.size());
    peers.push_back(member.id.hex());
    if (!member.replica.empty()) replicas.push_back(member.replica);
  }
  return {view->record->epoch, rank, peers.size(), peers, comm.engine->group(), replicas};
}

std::vector<std::string> present(const Comm& comm) {
  const Result<peer::Record> record = comm.engine->newest();
  if (!record) raise(record.error(), CallKind::question, "present");
  std::vector<std::string> peers;
  if (*record == nullptr) return peers;
  for (const wire::Member& member : (*record)->members) peers.push_back(member.id.hex());
  return peers;
}

using Classes = std::vector<std::tuple<std::uint64_t, int, std::vector<std::uint32_t>>>;
using Links = std::vector<std::tuple<bool, std::uint32_t, std::uint32_t>>;
using Hosts = std::vector<std::pair<std::uint32_t, std::uint32_t>>;

// What is known of the network, and the plan made from it: members in rank order; kB/s up and down
// of each; of each ordered pair whether it is unreachable, kB/s and microseconds there and back;
// the ring; the size classes; who shares a host, who is in which region; links of the plan that go
// through the master.
std::tuple<std::vector<std::string>, Hosts, Links, std::vector<std::uint32_t>, Classes,
           std::vector<std::uint32_t>, std::vector<std::uint32_t>, std::vector<topology::Edge>>
topology_of(const Comm& comm) {
  const Result<node::View> view = comm.engine->view();
  if (!view) raise(view.error(), CallKind::question, "topology");
  if (view->record == nullptr) return {};
  const wire::EpochRecord& record = *view->record;
  std::vector<std::string> peers;
  for (const wire::Member& member : record.members) peers.push_back(member.id.hex());
  Hosts hosts;
  for (const wire::HostRate& rate : record.rates.hosts)
    hosts.emplace_back(rate.up_kilobytes_per_s, rate.down_kilobytes_per_s);
  Links links;
  for (const wire::LinkRate& rate : record.rates.links)
    links.emplace_back(rate.unreachable, rate.kilobytes_per_s, rate.rtt_us);
  Classes classes;
  for (const wire::SizeClass& size : record.plan.classes)
    classes.emplace_back(size.max_bytes, static_cast<int>(size.kind), size.shares);
  std::vector<topology::Edge> relayed;
  const std::set<topology::Edge> used = topology::edges(record.plan);
  for (const auto& [a, b] : record.relayed)
    if (used.contains({a, b})) relayed.emplace_back(a, b);
  return {peers,  hosts, links, record.plan.order, classes, record.plan.hosts, record.plan.regions,
          relayed};
}

std::uint64_t attribute(const Comm& comm, int which) {
  const char* function = "get_attribute";
  const Result<node::View> view = comm.engine->view();
  if (!view) raise(view.error(), CallKind::question, function);
  switch (which) {  // pccl.types.Attribute
    case 1:
      return view->census.members;
    case 2:
      return view->record == nullptr ? 0 : view->record->members.size();
    case 3:
      return view->census.groups;
    case 4:
      return view->census.largest_group;
    default:
      raise({Code::invalid_argument, "no such attribute", {}, {}}, CallKind::question, function);
  }
}

}  // namespace

void bind_communicator(nb::module_& m) {
  nb::class_<Comm> communicator(m, "Communicator");
  bind_sync(m, communicator);
  communicator
      .def(nb::new_(&make), "master"_a, nb::kw_only(), "peer_group"_a, "stripes"_a, "port"_a,
           "advertise"_a, "replica"_a = "", "ranks_per_replica"_a = 0,
           nb::arg("secret").none() = nb::none())
      .def(
          "join",
          [](Comm& comm, std::uint32_t min_peers, unsigned attempts, Seconds timeout, bool enter) {
            block(comm, timeout, CallKind::connect, enter ? "connect" : "init",
                  [&](auto& engine, const auto& limit) {
                    return engine.join({min_peers, attempts, enter}, limit);
                  });
          },
          nb::kw_only(), "min_peers"_a, "attempts"_a, nb::arg("timeout").none(), "enter"_a)
      .def(
          "admit",
          [](Comm& comm, Seconds timeout) {
            return block(comm, timeout, CallKind::topology, "admit",
                         [](auto& engine, const auto& limit) { return engine.admit(limit); });
          },
          nb::arg("timeout").none())
      .def(
          "update_topology",
          [](Comm& comm, Seconds timeout) {
            block(comm, timeout, CallKind::topology, "update_topology",
                  [](auto& engine, const auto& limit) { return engine.update_topology(limit); });
          },
          nb::arg("timeout").none())
      .def(
          "peers_pending",
          [](Comm& comm, Seconds timeout) {
            return block(
                comm, timeout, CallKind::question, "are_peers_pending",
                [](auto& engine, const auto& limit) { return engine.peers_pending(limit); });
          },
          nb::arg("timeout").none())
      .def(
          "barrier",
          [](Comm& comm, Seconds timeout) {
            block(comm, timeout, CallKind::collective, "barrier",
                  [](auto& engine, const auto& limit) { return engine.barrier(limit); });
          },
          nb::arg("timeout").none())
      .def(
          "optimize_topology",
          [](Comm& comm, Seconds timeout) {
            block(comm, timeout, CallKind::collective, "optimize_topology",
                  [](auto& engine, const auto& limit) { return engine.optimize(limit); });
          },
          nb::arg("timeout").none())
      .def("start", &start_operation, "arrays"_a, nb::kw_only(), "op"_a, nb::arg("tag").none(),
           "level"_a, "rerun"_a, "structure"_a, "description"_a, nb::arg("timeout").none(),
           "kind"_a = 0, "root"_a = 0, "parts"_a = 0, nb::arg("quantize").none() = nb::none(),
           "residuals"_a = nb::tuple(), "any_thread"_a = false, "wait"_a = false,
           "kept"_a = nb::none())
      .def("reduce_tree", &reduce_tree, "tree"_a, nb::arg("out").none(), "op"_a,
           nb::arg("tag").none(), nb::arg("timeout").none())
      .def("start_tree", &start_tree, "tree"_a, nb::arg("out").none(), "op"_a,
           nb::arg("tag").none(), nb::arg("timeout").none())
      .def("topology", &topology_of)
      .def("membership", &membership)
      .def("present", &present)
      .def("attribute", &attribute, "which"_a)
      .def("unfinished", [](const Comm& comm) { return comm.engine->unfinished(); })
      .def("peer_id", [](const Comm& comm) { return comm.engine->id().hex(); })
      .def("is_open", [](const Comm& comm) { return comm.engine->is_open(); })
      .def(
          "close",
          [](Comm& comm, const std::string& failure) {
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
