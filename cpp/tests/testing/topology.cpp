// Plans chosen from measurements, directly and by a master from its members' rows.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pccl/collective/schedule.h"
#include "pccl/master/group.h"
#include "pccl/topology/choose.h"
#include "pccl/topology/predict.h"
#include "pccl/topology/rates.h"
#include "tests/nobody.h"
#include "tests/peers.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace collective = pccl::collective;
namespace master = pccl::master;
namespace topology = pccl::topology;
namespace wire = pccl::wire;

namespace {

using Ranks = std::vector<std::uint32_t>;
using Pairs = std::set<std::pair<std::uint32_t, std::uint32_t>>;
// A table: (up, down) by rank, and (unreachable, kilobytes per s, rtt in us, kilobytes per s beside
// all others) by from * n + to.
using Hosts = std::vector<std::pair<std::uint32_t, std::uint32_t>>;
using Links = std::vector<std::tuple<bool, std::uint32_t, std::uint32_t, std::uint32_t>>;
using Table = std::pair<Hosts, Links>;
using Classes = std::vector<std::tuple<std::uint64_t, std::string, Ranks>>;
// A plan: (order, classes, hosts, regions).
using PlanTuple = std::tuple<Ranks, Classes, Ranks, Ranks>;

constexpr std::uint32_t kSegmentBytes = 512 << 10;
constexpr const char* kKinds[] = {"ring", "direct", "host_ring", "host_direct", "regional"};

wire::RateTable table_from(const Table& given) {
  wire::RateTable table;
  for (const auto& [up, down] : given.first) table.hosts.push_back({up, down});
  for (const auto& [bad, rate, rtt, together] : given.second)
    table.links.push_back({bad, rate, rtt, together});
  if (table.links.size() != table.hosts.size() * table.hosts.size())
    throw nb::value_error("a table has a link for every pair");
  return table;
}

Table to_python(const wire::RateTable& table) {
  Table given;
  for (const wire::HostRate& host : table.hosts)
    given.first.emplace_back(host.up_kilobytes_per_s, host.down_kilobytes_per_s);
  for (const wire::LinkRate& link : table.links)
    given.second.emplace_back(link.unreachable, link.kilobytes_per_s, link.rtt_us,
                              link.together_kilobytes_per_s);
  return given;
}

PlanTuple to_python(const wire::Plan& plan) {
  Classes classes;
  for (const wire::SizeClass& size : plan.classes)
    classes.emplace_back(size.max_bytes, kKinds[static_cast<std::size_t>(size.kind)], size.shares);
  return {plan.order, classes, plan.hosts, plan.regions};
}

wire::Plan plan_from(const PlanTuple& given) {
  wire::Plan plan;
  plan.segment_bytes = kSegmentBytes;
  Classes classes;
  std::tie(plan.order, classes, plan.hosts, plan.regions) = given;
  for (const auto& [max_bytes, kind, shares] : classes) {
    const auto* const found = std::find(std::begin(kKinds), std::end(kKinds), kind);
    if (found == std::end(kKinds)) throw nb::value_error("no such kind");
    plan.classes.push_back(
        {max_bytes, static_cast<wire::ScheduleKind>(found - std::begin(kKinds)), shares});
  }
  if (!topology::valid(plan, plan.order.size())) throw nb::value_error("not a plan");
  return plan;
}

topology::Network network_of(const Table& given) {
  topology::HostRanks sites;
  for (std::uint32_t rank = 0; rank < given.first.size(); ++rank) sites.push_back({rank});
  return topology::network(table_from(given), sites);
}

topology::Thresholds thresholds(std::uint32_t mesh) {
  topology::Thresholds made;
  made.mesh = mesh;
  return made;
}

// (plan, links used) without measurements, or None.
nb::object plain_plan(std::uint32_t world, const Pairs& unusable, const Ranks& hosts,
                      std::uint32_t mesh) {
  const auto plan = topology::make_plan(world, kSegmentBytes, unusable, hosts, thresholds(mesh));
  if (!plan) return nb::none();
  return nb::make_tuple(nb::cast(to_python(*plan)), nb::cast(topology::edges(*plan)));
}

// (plan, why, links used), or None.
nb::object choose_plan(const Table& table, const Pairs& unusable, const Ranks& hosts,
                       std::uint32_t mesh) {
  const auto world = static_cast<std::uint32_t>(table.first.size());
  const auto choice = topology::choose(
      {world, kSegmentBytes, unusable, hosts, table_from(table), thresholds(mesh)});
  if (!choice) return nb::none();
  return nb::make_tuple(nb::cast(to_python(choice->plan)), choice->why,
                        nb::cast(topology::edges(choice->plan)));
}

// The kind and the shares with which quantized operations run.
std::pair<std::string, Ranks> coded_class(const PlanTuple& given, std::uint64_t bytes) {
  const wire::Plan plan = plan_from(given);
  const wire::SizeClass& size = topology::size_class(plan, bytes, false, true);
  return {kKinds[static_cast<std::size_t>(size.kind)], size.shares};
}

collective::Schedule schedule_of(const PlanTuple& given, std::uint64_t bytes, std::uint32_t rank,
                                 unsigned kind) {
  const wire::Plan plan = plan_from(given);
  if (rank >= plan.order.size() || kind >= collective::kKindCount)
    throw nb::value_error("rank or kind");
  return collective::make_schedule(plan, topology::size_class(plan, bytes, false), rank,
                                   {static_cast<collective::Kind>(kind), 0}, bytes);
}

// By chunk of an all-to-all: the ranks whose elements each contribution holds that `rank` receives.
// And the most that one may hold.
nb::tuple plan_contents(const PlanTuple& plan, std::uint64_t bytes, std::uint32_t rank) {
  const collective::Schedule schedule =
      schedule_of(plan, bytes, rank, static_cast<unsigned>(collective::Kind::all_to_all));
  nb::list chunks;
  for (const collective::ChunkFlow& flow : schedule.chunks) {
    nb::list contents;
    for (const collective::Source& source : flow.sources) contents.append(nb::cast(source.ranks));
    chunks.append(contents);
  }
  return nb::make_tuple(chunks, schedule.most_ranks);
}

// One rank's part of a collective in the class of `bytes`: (sources, target of the partial result,
// source and targets of the final result) by chunk, and the chunks' shares.
nb::tuple plan_flows(const PlanTuple& given, std::uint64_t bytes, std::uint32_t rank,
                     unsigned kind) {
  const collective::Schedule schedule = schedule_of(given, bytes, rank, kind);
  nb::list chunks;
  const auto peer = [](std::uint32_t number) {
    return number == collective::kNobody ? nb::none() : nb::object(nb::int_(number));
  };
  for (const collective::ChunkFlow& flow : schedule.chunks) {
    nb::list sources;
    for (const collective::Source& source : flow.sources) sources.append(source.rank);
    chunks.append(nb::make_tuple(sources, peer(flow.partial_to), peer(flow.final_from),
                                 nb::cast(flow.final_to)));
  }
  return nb::make_tuple(chunks, nb::cast(schedule.shares));
}

// -- the master

// Ignores everything but what planners are asked about.
class Deaf final : public pccl::tests::Nobody {
 public:
  void send(master::ConnectionId, std::uint64_t, const wire::Message& message) override {
    const auto* log = std::get_if<wire::Log>(&message);
    if (log == nullptr) return;
    for (const wire::LogEntry& entry : log->entries) {
      if (const auto* outcome = std::get_if<wire::Outcome>(&entry.what))
        outcomes += outcome->code == pccl::Code::ok ? 1U : 0U;
    }
  }
  void log(master::LogLine line) override {
    lines.push_back("group " + std::to_string(line.group.value_or(0)) + ": " + line.text);
  }

  unsigned outcomes = 0;  // received, once per member
  std::vector<std::string> lines;
};

// ([(to, unreachable, kilobytes per s, rtt in us)], up, down)
using Row = std::tuple<std::vector<std::tuple<std::uint8_t, bool, std::uint32_t, std::uint32_t>>,
                       std::uint32_t, std::uint32_t>;

// A group with the members 1, 2, ...
class Planner {
 public:
  explicit Planner(std::uint8_t members) {
    for (std::uint8_t number = 1; number <= members; ++number) {
      wire::Join join;
      join.id = pccl::tests::peer(number);
      join.ticket = {join.id.bytes};
      join.min_peers = members;
      join.waiting = true;
      group_->add_candidate(number, join, {}, now_);
    }
  }

  // All members enter a round of optimize_topology; those without a row report nothing.
  void optimize(const std::vector<std::optional<Row>>& rows) {
    const std::uint64_t sequence = sequence_++;
    const std::vector<wire::Member> members = group_->record().members;
    for (std::size_t rank = 0; rank < members.size(); ++rank) {
      wire::RoundEntry entry;
      entry.key = {wire::RoundKind::optimize, group_->record().admission, sequence};
      if (rank < rows.size() && rows[rank]) entry.payload = row(*rows[rank]);
      group_->on_message(members[rank].id.bytes[0], {{}, wire::EnterRound{entry}}, now_);
    }
  }

  void measured(std::uint8_t number, const Row& given) {
    group_->on_message(number, {{}, wire::Measured{row(given)}}, now_);
  }

  void tick(unsigned seconds) {
    for (; seconds > 0; --seconds) {
      now_ += std::chrono::seconds(1);
      for (const wire::Member& member : group_->record().members)
        group_->on_message(member.id.bytes[0], {{}, wire::Heartbeat{}}, now_);
      group_->on_time(now_);
    }
  }

  void leave(std::uint8_t number) { group_->on_message(number, {{}, wire::Leave{"done"}}, now_); }

  // Restarts the master.
  void rebuild() {
    std::vector<master::Returned> reports;
    for (const wire::Member& member : group_->record().members) {
      reports.emplace_back(
          member.id.bytes[0],
          wire::Rejoin{member.id, 0, group_->record(), group_->log().last(), {member.id.bytes}});
    }
    group_ = master::Group::rebuild(0, {}, around_, reports, {}, now_);
  }

  // (epoch, cause, plan, table, members, outcomes received)
  [[nodiscard]] nb::tuple record() const {
    const wire::EpochRecord& record = group_->record();
    std::vector<unsigned> members;
    for (const wire::Member& member : record.members) members.push_back(member.id.bytes[0]);
    return nb::make_tuple(record.epoch, static_cast<unsigned>(record.cause),
                          nb::cast(to_python(record.plan)), nb::cast(to_python(record.rates)),
                          nb::cast(members), around_.outcomes);
  }
  [[nodiscard]] std::vector<std::string> lines() const { return around_.lines; }

 private:
  static wire::Measurements row(const Row& given) {
    wire::Measurements measured;
    for (const auto& [to, bad, rate, rtt] : std::get<0>(given))
      measured.links.push_back({pccl::tests::peer(to), {bad, rate, rtt}});
    measured.total = {std::get<1>(given), std::get<2>(given)};
    return measured;
  }

  Deaf around_;
  std::unique_ptr<master::Group> group_ =
      std::make_unique<master::Group>(0, master::Options{}, around_);
  std::uint64_t sequence_ = 0;
  pccl::Instant now_{std::chrono::seconds(1000)};
};

}  // namespace

void bind_topology(nb::module_& m) {
  m.def("plain_plan", &plain_plan, "world"_a, "unusable"_a = Pairs(), "hosts"_a = Ranks(),
        "mesh"_a = topology::kMaxMesh);
  m.def("choose_plan", &choose_plan, "table"_a, "unusable"_a = Pairs(), "hosts"_a = Ranks(),
        "mesh"_a = topology::kMaxMesh);
  m.def("plan_flows", &plan_flows, "plan"_a, "bytes"_a, "rank"_a, "kind"_a = 0);
  m.def("coded_class", &coded_class, "plan"_a, "bytes"_a);
  m.def("plan_contents", &plan_contents, "plan"_a, "bytes"_a, "rank"_a);
  m.def(
      "best_ring", [](const Table& table) { return topology::best_ring(network_of(table)); },
      "table"_a);
  m.def(
      "best_shares", [](const Table& table) { return topology::best_shares(network_of(table)); },
      "table"_a);
  m.def(
      "predict",
      [](const PlanTuple& plan, const Table& table, std::uint64_t bytes) {
        return topology::predict(plan_from(plan), table_from(table), bytes);
      },
      "plan"_a, "table"_a, "bytes"_a);
  m.def(
      "lower_bound",
      [](const Table& table, std::uint64_t bytes) {
        return topology::lower_bound(network_of(table), bytes);
      },
      "table"_a, "bytes"_a);
  m.def(
      "worth_changing",
      [](const PlanTuple& present, const PlanTuple& other, const Table& table) {
        return topology::worth_changing(plan_from(present), plan_from(other), table_from(table));
      },
      "present"_a, "other"_a, "table"_a);
  nb::class_<Planner>(m, "Planner")
      .def(nb::init<std::uint8_t>(), "members"_a)
      .def("optimize", &Planner::optimize, "rows"_a)
      .def("measured", &Planner::measured, "number"_a, "row"_a)
      .def("tick", &Planner::tick, "seconds"_a)
      .def("leave", &Planner::leave, "number"_a)
      .def("rebuild", &Planner::rebuild)
      .def("record", &Planner::record)
      .def("lines", &Planner::lines);
}
