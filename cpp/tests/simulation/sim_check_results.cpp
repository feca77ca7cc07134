// Checks of results: I2 (equal and right on all members) and I5 (no silent wrong answer).
#include <algorithm>
#include <cmath>

#include "tests/simulation/sim_world.h"

namespace pccl::simulation {
namespace {

std::int64_t combine(ReduceOp op, std::int64_t a, std::int64_t b) {
  switch (op) {
    case ReduceOp::max:
      return std::max(a, b);
    case ReduceOp::min:
      return std::min(a, b);
    case ReduceOp::prod:
      return a * b;
    default:
      return a + b;
  }
}

}  // namespace

// -- I2: results are right

// Values are rounded by up to a step twice (contributions and result), and once more by regions.
// With feedback, the kept error of each member may add up to 1.
bool Checks::near(const Reduction& reduction, const ArrayData& array,
                  const std::vector<std::int64_t>& expected, std::size_t members, bool feedback) {
  const double largest = array.dtype == DataType::float32 && reduction.op == ReduceOp::avg
                             ? kDivisible * 12.0
                             : 12.0;  // see start_reduction
  double step = 2 * largest / 254;
  if (reduction.quantization.code == reduce::CodeType::bits4) step = 2 * largest / 14;
  if (reduction.quantization.code == reduce::CodeType::float8) step = largest / 8;
  if (array.dtype == DataType::float16) step += largest / 1024;
  const double times = ran_by_regions(reduction) ? 3.01 : 2.01;
  const double most = (times * step + (feedback ? 1 : 0)) *
                      (reduction.op == ReduceOp::sum ? static_cast<double>(members) : 1.0);
  const std::vector<double> got = to_numbers(array.dtype, array.result());
  if (got.size() != expected.size()) return false;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double off = got[i] - static_cast<double>(expected[i]);
    if (!(std::abs(off) <= most)) return false;
  }
  return true;
}

bool Checks::ran_by_regions(const Reduction& reduction) {
  std::uint64_t bytes = 0;
  bool widens = false;
  for (const ArrayData& array : reduction.arrays) {
    const std::size_t element = element_size(array.dtype);
    bytes += array.count * element;
    widens = widens || accumulation_size(array.dtype, reduction.op) > element;
  }
  const wire::SizeClass& size = topology::size_class(reduction.call->record->plan, bytes, widens,
                                                     static_cast<bool>(reduction.quantization));
  return size.kind == wire::ScheduleKind::regional;
}

// Whether members send elements to their receivers, not through others.
bool Checks::goes_straight(const Reduction& reduction) {
  const wire::Plan& plan = reduction.call->record->plan;
  const collective::Schedule schedule =
      collective::make_schedule(plan, plan.classes.front(), 0, {collective::Kind::all_to_all, 0});
  return schedule.most_ranks == 1;
}

void Checks::right_result(const Host& host, const OpId& id, const Reduction& reduction) {
  const auto& contributions = contributions_[id];
  const std::vector<PeerId> members = ids(reduction.call->record);
  std::vector<const Contribution*> inputs;
  for (const PeerId& member : members) {
    const auto it = contributions.find(member);
    if (it == contributions.end()) {
      return fail("I2", wire::describe(id.second) + " is committed on " + host.name() +
                            " for a member that never called it: " + member.brief());
    }
    inputs.push_back(&it->second);
  }
  using collective::Kind;
  const Kind kind = reduction.kind;
  const auto rank = static_cast<std::size_t>(
      std::find(members.begin(), members.end(), host.engine().session().id()) - members.begin());
  if (kind == Kind::all_reduce && ran_by_regions(reduction))
    world_.report.reached.emplace("result by regions", host.state());
  if (kind != Kind::all_reduce && topology::on_one_host(reduction.call->record->plan))
    world_.report.reached.emplace("half on one host", host.state());
  if (kind == Kind::all_to_all && members.size() > 2)
    world_.report.reached.emplace(goes_straight(reduction) ? "all-to-all" : "all-to-all on paths",
                                  host.state());
  for (std::size_t a = 0; a < reduction.arrays.size(); ++a) {
    const ArrayData& array = reduction.arrays[a];
    std::vector<std::int64_t> expected;
    const auto input = [&](std::size_t member) -> const std::vector<std::int32_t>& {
      return inputs[member]->arrays[a].second;
    };
    if (kind == Kind::broadcast) {
      const auto root = std::find(members.begin(), members.end(), reduction.root);
      if (root == members.end())
        return fail("I2", wire::describe(id.second) + " is committed without its root");
      const auto& values = input(static_cast<std::size_t>(root - members.begin()));
      expected.assign(values.begin(), values.end());
    }
    for (std::size_t m = 0; m < inputs.size() && kind == Kind::all_gather; ++m)
      expected.insert(expected.end(), input(m).begin(), input(m).end());
    const std::size_t first = collective::scatters(kind) ? rank * array.count : 0;
    for (std::size_t m = 0; m < inputs.size() && kind == Kind::all_to_all; ++m) {
      const auto part = input(m).begin() + static_cast<std::ptrdiff_t>(first);
      expected.insert(expected.end(), part, part + static_cast<std::ptrdiff_t>(array.count));
    }
    for (std::size_t i = first; i < first + array.count && collective::reduces(kind); ++i) {
      std::int64_t value = input(0)[i];
      for (std::size_t m = 1; m < inputs.size(); ++m)
        value = combine(reduction.op, value, input(m)[i]);
      if (reduction.op == ReduceOp::avg) value /= static_cast<std::int64_t>(inputs.size());
      expected.push_back(value);
    }
    const bool floating = array.dtype == DataType::float32 || array.dtype == DataType::float16;
    const bool feedback = std::any_of(inputs.begin(), inputs.end(), [a](const Contribution* one) {
      return !one->left_before[a].empty();
    });
    const bool right = reduction.quantization && floating
                           ? near(reduction, array, expected, inputs.size(), feedback)
                           : to_bytes(array.dtype, expected) == array.result();
    if (!right) {
      return fail("I2", wire::describe(id.second) + " has a wrong result on " + host.name() +
                            ", array " + std::to_string(a));
    }
  }
}

// If all members keep rounding errors, nothing is lost: the sum of the inputs is the result plus
// the kept errors. Checked when the last member has finished.
void Checks::nothing_lost(const Host& host, const OpId& id, const Reduction& reduction) {
  auto& contributions = contributions_[id];
  auto& own = contributions[host.engine().session().id()].left_out;
  for (const ArrayData& array : reduction.arrays) {
    own.push_back(array.left_out);
    if (!own.back().empty() && world_.bug_due(Bug::lose_left_out)) own.back().back() += 2;
  }
  const std::vector<PeerId> members = ids(reduction.call->record);
  for (const PeerId& member : members)
    if (contributions[member].left_out.size() != reduction.arrays.size()) return;
  const auto n = static_cast<double>(members.size());
  for (std::size_t a = 0; a < reduction.arrays.size(); ++a) {
    const ArrayData& array = reduction.arrays[a];
    const bool all = std::none_of(members.begin(), members.end(), [&](const PeerId& member) {
      return contributions[member].left_before[a].empty();
    });
    if (!all) continue;
    const bool narrow = array.dtype == DataType::float16;
    const bool mean = reduction.op == ReduceOp::avg;
    const double largest = mean && !narrow ? kDivisible * 12.0 : 12.0;  // see start_reduction
    const double accuracy = narrow ? 2e-3 : 1e-5;
    const std::vector<double> got = to_numbers(array.dtype, array.result());
    for (std::size_t i = 0; i < array.count; ++i) {
      double missing = -got[i] * (mean ? n : 1.0);
      for (const PeerId& member : members) {
        const Contribution& one = contributions[member];
        missing += one.arrays[a].second[i] + double{one.left_before[a][i]} - one.left_out[a][i];
      }
      if (std::abs(missing) > accuracy * largest * n) {
        return fail("I3", wire::describe(id.second) + " lost " + std::to_string(missing) +
                              " of element " + std::to_string(i) + " of array " +
                              std::to_string(a));
      }
    }
    world_.report.reached.emplace("nothing left out is lost", host.state());
  }
}

// -- I5: no silent wrong answer

void Checks::mismatch_is_for_all(const Host& host, const OpId& id, const Reduction& reduction) {
  const auto& contributions = contributions_[id];
  for (const PeerId& member : ids(reduction.call->record)) {
    const auto it = contributions.find(member);
    if (it == contributions.end() || it->second.shape == reduction.shape) continue;
    return fail("I5", wire::describe(id.second) + " is committed on " + host.name() +
                          " though member " + member.brief() + " called it differently");
  }
}

// A call meets the calls that the other programs make at the same position: no member has made more
// calls than others, even after calls that failed or ran again.
void Checks::same_position(const Host& host, const OpId& id, const Reduction& reduction) {
  const auto& contributions = contributions_[id];
  for (const PeerId& member : ids(reduction.call->record)) {
    const auto it = contributions.find(member);
    if (it == contributions.end() || it->second.position == reduction.position) continue;
    return fail("I5", wire::describe(id.second) + " of " + host.name() +
                          " met another call of member " + member.brief());
  }
}

}  // namespace pccl::simulation
