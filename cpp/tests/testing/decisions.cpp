// The master's judgements and plans, with small numbers as peers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "pccl/master/judgements.h"
#include "pccl/topology/plan.h"
#include "tests/peers.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace master = pccl::master;
namespace topology = pccl::topology;
namespace wire = pccl::wire;
using pccl::tests::peer;

namespace {

// `claims`: (peer, hash) in rank order.
std::optional<unsigned> judge_mismatch(
    const std::vector<std::pair<std::uint8_t, std::uint64_t>>& claims, std::size_t members,
    bool waited_enough) {
  std::vector<master::Claim> given;
  for (const auto& [number, hash] : claims) given.push_back({peer(number), {hash, "text"}});
  const auto mismatch = master::judge_mismatch("a call", given, members, waited_enough,
                                               [](const pccl::PeerId& id) { return id.brief(); });
  if (!mismatch) return std::nullopt;
  return mismatch->culprit.bytes[0];
}

std::optional<unsigned> judge_links(
    const std::vector<std::uint8_t>& members,
    const std::vector<std::pair<std::uint8_t, std::uint8_t>>& reports) {
  std::vector<pccl::PeerId> ids;
  for (const std::uint8_t number : members) ids.push_back(peer(number));
  std::vector<master::BadLink> bad;
  for (const auto& [reporter, about] : reports) bad.push_back({peer(reporter), peer(about)});
  const auto worst = master::judge_links(ids, bad);
  if (!worst) return std::nullopt;
  return worst->bytes[0];
}

// A member is (current, calls it waits in, several threads, one outside, bytes moving). `meets`:
// calls that all members have entered. Returns 0 moving, 1 suspicious, 2 stuck.
using Member = std::tuple<bool, std::vector<std::uint64_t>, bool, bool, bool>;
int judge_stuck(const std::vector<Member>& members, const std::set<std::uint64_t>& meets) {
  std::vector<master::Waiting> waiting;
  for (const auto& [current, calls, several, outside, moving] : members) {
    master::Waiting member;
    member.current = current;
    for (const std::uint64_t call : calls) {
      member.blocked.waits.emplace_back(wire::OpKey{1, false, 0, call});
    }
    member.blocked.multi_threaded = several;
    member.blocked.outside = outside;
    member.blocked.moving = moving;
    waiting.push_back(std::move(member));
  }
  return static_cast<int>(master::judge_stuck(waiting, [&](const wire::CallKey& call) {
    return meets.contains(std::get<wire::OpKey>(call).sequence);
  }));
}

// (order, the size classes' kinds, links used), or None when no plan avoids `unusable`.
nb::object make_plan(std::uint32_t world,
                     const std::set<std::pair<std::uint32_t, std::uint32_t>>& unusable,
                     const std::vector<std::uint32_t>& hosts) {
  const auto plan = topology::make_plan(world, 4096, unusable, hosts);
  if (!plan) return nb::none();
  constexpr const char* kNames[] = {"ring", "direct", "host_ring", "host_direct", "regional"};
  static_assert(std::size(kNames) == enum_count(wire::ScheduleKind{}));
  nb::list kinds;
  for (const wire::SizeClass& size : plan->classes)
    kinds.append(kNames[static_cast<std::size_t>(size.kind)]);
  return nb::make_tuple(nb::cast(plan->order), kinds, nb::cast(topology::edges(*plan)));
}

}  // namespace

void bind_decisions(nb::module_& m) {
  m.def("judge_mismatch", &judge_mismatch, "claims"_a, "members"_a, "waited_enough"_a);
  m.def("judge_links", &judge_links, "members"_a, "reports"_a);
  m.def("judge_stuck", &judge_stuck, "members"_a, "meets"_a);
  m.def("make_plan", &make_plan, "world"_a, "unusable"_a, "hosts"_a = std::vector<std::uint32_t>());
  m.def("detours", &pccl::topology::detours, "world"_a, "unusable"_a, "never"_a, "most"_a,
        "hosts"_a = std::vector<std::uint32_t>());
  m.def("plannable", &pccl::topology::plannable, "world"_a, "unusable"_a, "never"_a, "most"_a);
}
