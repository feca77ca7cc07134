// Simulated runs as a plain Python function.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "pccl/link/links.h"
#include "pccl/peer/calls.h"
#include "tests/simulation/simulation.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace simulation = pccl::simulation;

namespace {

// Calls `visit(name, field)` for every number that a test may set.
template <class Visit>
void each_number(simulation::Options& options, Visit&& visit) {
  visit("peers", options.peers);
  visit("joins", options.joins);
  visit("steps", options.steps);
  visit("max_elements", options.max_elements);
  visit("kills", options.kills);
  visit("freezes", options.freezes);
  visit("partitions", options.partitions);
  visit("cuts", options.cuts);
  visit("stalls", options.stalls);
  visit("corruptions", options.corruptions);
  visit("leaves", options.leaves);
  visit("aborts", options.aborts);
  visit("restarts", options.restarts);
  visit("master_stalls", options.master_stalls);
  visit("masters", options.masters);
  visit("splits", options.splits);
  visit("lies", options.lies);
  visit("machines", options.machines);
  visit("ranks", options.ranks);
  visit("hidden", options.hidden);
  visit("relays", options.relays);
  visit("patience", options.patience);
}

constexpr const char* kProgramNames[simulation::kPrograms] = {"explicit", "simple", "threads",
                                                              "mismatch", "stuck",  "sync"};
constexpr const char* kBugNames[simulation::kBugs] = {
    "none",         "flip_result", "other_verdict", "touch_input",   "lose_report",
    "forget_entry", "stale_state", "commit_alone",  "lose_left_out", "skip_call",
    "forge_accept", "hide_accept", "split_commit"};

template <class Enum, std::size_t N>
Enum by_name(const char* const (&names)[N], const std::string& name) {
  for (std::size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  throw nb::value_error(("no such name: " + name).c_str());
}

// Options that are not given are drawn from the seed; with `quiet` there are no faults by default.
simulation::Options options_from(std::uint64_t seed, const nb::kwargs& given) {
  simulation::Options options = simulation::Options::draw(seed);
  if (given.contains("quiet") && nb::cast<bool>(given["quiet"])) {
    options.kills = options.freezes = options.partitions = options.cuts = options.stalls = 0;
    options.corruptions = options.leaves = options.aborts = options.restarts = 0;
    options.master_stalls = options.hidden = options.relays = options.patience = 0;
  }
  // The relay of a master that is gone is not simulated.
  if (given.contains("masters")) options.hidden = options.relays = 0;
  // Replicas only if all options are drawn or `ranks` is given.
  for (const auto& [key, value] : given)
    if (nb::cast<std::string>(key) != "trace") options.ranks = 0;
  for (const auto& [key, value] : given) {
    const auto name = nb::cast<std::string>(key);
    bool known = name == "quiet";
    each_number(options, [&, given_value = value](const char* field, std::uint32_t& number) {
      if (name != field) return;
      number = nb::cast<std::uint32_t>(given_value);
      known = true;
    });
    if (name == "program") {
      options.program = by_name<simulation::Program>(kProgramNames, nb::cast<std::string>(value));
    } else if (name == "bug") {
      options.bug = by_name<simulation::Bug>(kBugNames, nb::cast<std::string>(value));
    } else if (name == "trace") {
      options.trace = nb::cast<bool>(value);
    } else if (!known) {
      throw nb::type_error(("simulate() has no option " + name).c_str());
    }
  }
  if (!given.contains("joins") && options.peers <= simulation::kMostMembers)
    options.joins = std::min(options.joins, simulation::kMostMembers - options.peers);
  const std::uint32_t ranks = options.ranks == 0 ? 1 : options.ranks;
  const std::uint32_t most = options.peers + options.joins;
  if (options.peers == 0 || ranks > 16 || most > simulation::kMostMembers || most * ranks > 16) {
    throw nb::value_error(
        "peers: at least one, and with those that join at most 12 in a group "
        "and 16 in all");
  }
  return options;
}

// (from, to, cause, times taken) for each row of a transition table.
template <class Rows>
nb::list transitions(const Rows& rows, const std::vector<std::uint64_t>& taken) {
  nb::list all;
  for (std::size_t i = 0; i < rows.size(); ++i)
    all.append(nb::make_tuple(name(rows[i].from), name(rows[i].to), rows[i].cause,
                              i < taken.size() ? taken[i] : 0));
  return all;
}

nb::dict simulate(std::uint64_t seed, const nb::kwargs& given) {
  const simulation::Options options = options_from(seed, given);
  simulation::Report report;
  {
    const nb::gil_scoped_release release;
    report = simulation::simulate(seed, options);
  }
  nb::dict result;
  result["options"] = options.describe();
  result["events"] = report.events;
  result["commits"] = report.commits;
  result["aborts"] = report.aborts;
  result["reruns"] = report.reruns;
  result["syncs"] = report.syncs;
  result["sync_failures"] = report.sync_failures;
  result["sync_bytes"] = report.sync_bytes;
  result["epochs"] = report.epochs;
  result["faults"] = report.faults;
  result["kills"] = report.kills;
  result["joins"] = report.joins;
  result["evictions"] = report.evictions;
  result["restarts"] = report.restarts;
  result["takeovers"] = report.takeovers;
  result["gave_way"] = report.gave_way;
  result["doubts"] = report.doubts;
  result["master_lost"] = report.master_lost;
  result["rebuilds"] = report.rebuilds;
  result["deadlocks"] = report.deadlocks;
  result["mismatches"] = report.mismatches;
  result["checksum_drops"] = report.checksum_drops;
  result["stand_ins"] = report.stand_ins;
  result["sent_again"] = report.sent_again;
  result["relayed"] = report.relayed;
  result["seconds"] = report.seconds;
  result["reached"] = nb::cast(report.reached);
  result["link_transitions"] = transitions(pccl::link::link_transitions(), report.link_transitions);
  result["call_transitions"] = transitions(pccl::peer::call_transitions(), report.call_transitions);
  result["violation"] = report.violation;
  result["trace"] = nb::cast(report.trace);
  return result;
}

}  // namespace

void bind_simulation(nb::module_& m) { m.def("simulate", &simulate, "seed"_a, "given"_a); }
