#include "pccl/state/memory.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace pccl::state {
namespace {

constexpr int kMaxSteps = 1 << 20;  // of one comparison: about 10 ms

// An array as runs of bytes, with positive strides; contiguous axes are merged into the runs.
struct Runs {
  std::uint64_t begin = 0;
  std::uint64_t run = 0;                                      // bytes
  std::vector<std::pair<std::uint64_t, std::uint64_t>> axes;  // largest stride first

  [[nodiscard]] std::uint64_t end_of(std::uint64_t from, std::size_t axis,
                                     std::uint64_t count) const {
    std::uint64_t end = from + run;
    for (std::size_t i = axis; i < axes.size(); ++i)
      end += ((i == axis ? count : axes[i].first) - 1) * axes[i].second;
    return end;
  }
};

Runs runs_of(const Memory& memory) {
  Runs runs{memory.address, memory.item, {}};
  for (const auto& [count, stride] : memory.axes) {
    if (count <= 1 || stride == 0) continue;
    const auto size = static_cast<std::uint64_t>(stride < 0 ? -stride : stride);
    if (stride < 0) runs.begin -= size * (count - 1);
    runs.axes.emplace_back(count, size);
  }
  std::sort(runs.axes.begin(), runs.axes.end(),
            [](const auto& a, const auto& b) { return a.second > b.second; });
  while (!runs.axes.empty() && runs.axes.back().second == runs.run) {
    runs.run *= runs.axes.back().first;
    runs.axes.pop_back();
  }
  return runs;
}

// A part of an array: `count` elements of `axis` with all further axes.
struct Part {
  const Runs& runs;
  std::uint64_t begin = 0;
  std::size_t axis = 0;
  std::uint64_t count = 1;

  [[nodiscard]] std::uint64_t end() const { return runs.end_of(begin, axis, count); }
  [[nodiscard]] bool is_run() const { return axis == runs.axes.size(); }

  // The two halves of the outermost axis.
  [[nodiscard]] std::pair<Part, Part> halves() const {
    const std::uint64_t half = count / 2;
    const auto part = [&](std::uint64_t from, std::uint64_t size) {
      Part made{runs, begin + from * runs.axes[axis].second, axis, size};
      while (made.count == 1 && !made.is_run()) {
        ++made.axis;
        made.count = made.is_run() ? 1 : runs.axes[made.axis].first;
      }
      return made;
    };
    return {part(0, half), part(half, count - half)};
  }
};

Part whole(const Runs& runs) {
  return {runs, runs.begin, 0, runs.axes.empty() ? 1 : runs.axes.front().first};
}

bool meet(const Part& a, const Part& b, int& steps) {
  const std::uint64_t a_end = a.end();
  const std::uint64_t b_end = b.end();
  if (a_end <= b.begin || b_end <= a.begin) return false;
  if ((a.is_run() && b.is_run()) || --steps < 0) return true;
  if (b.is_run() || (!a.is_run() && a_end - a.begin >= b_end - b.begin)) {
    const auto [first, second] = a.halves();
    return meet(first, b, steps) || meet(second, b, steps);
  }
  const auto [first, second] = b.halves();
  return meet(a, first, steps) || meet(a, second, steps);
}

}  // namespace

Memory contiguous(const std::uint8_t* data, std::uint64_t bytes) {
  // NOLINTNEXTLINE: an address as a number
  return {reinterpret_cast<std::uintptr_t>(data), 1, {{bytes, 1}}, {}, true};
}

std::pair<std::uint64_t, std::uint64_t> span_of(const Memory& memory) {
  const Runs runs = runs_of(memory);
  return {runs.begin, whole(runs).end()};
}

bool overlap(const Memory& a, const Memory& b) {
  const Runs first = runs_of(a);
  const Runs second = runs_of(b);
  std::uint64_t period = 0;
  for (const Runs* runs : {&first, &second}) {
    for (const auto& [count, stride] : runs->axes) period = std::gcd(period, stride);
  }
  // The runs of each array repeat with this period, as interleaved columns do.
  if (period != 0 && first.run + second.run <= period) {
    const std::uint64_t apart = (second.begin % period + period - first.begin % period) % period;
    if (first.run <= apart && apart + second.run <= period) return false;
  }
  int steps = kMaxSteps;
  return meet(whole(first), whole(second), steps);
}

}  // namespace pccl::state
