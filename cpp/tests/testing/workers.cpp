// Threads that do the parts of a run, for tests/test_many_cores.py.
#include "pccl/io/workers.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace nb = nanobind;

namespace {

using Counts = std::vector<std::vector<unsigned>>;

// Runs that many parts, one run after the other. Returns how often each part was done. Between the
// first half of the runs and the second the number of threads becomes `then`.
Counts run_parts(unsigned threads, unsigned then, const std::vector<std::size_t>& runs) {
  pccl::io::Workers workers(threads);
  Counts counts;
  for (std::size_t run = 0; run < runs.size(); ++run) {
    if (run == runs.size() / 2) workers.resize(then);
    std::vector<std::atomic<unsigned>> done(runs[run]);
    workers.run(runs[run], [&](std::size_t part) { ++done[part]; });
    counts.emplace_back(done.begin(), done.end());
  }
  return counts;
}

// Throws what part `fails` throws, after all others are done.
void run_parts_and_fail(unsigned threads, std::size_t count, std::size_t fails) {
  pccl::io::Workers workers(threads);
  std::atomic<std::size_t> done{0};
  const auto work = [&](std::size_t part) {
    if (part == fails) throw std::runtime_error("part " + std::to_string(part));
    ++done;
  };
  for (int run = 0; run < 2; ++run) {
    done = 0;
    try {
      workers.run(count, work);
    } catch (const std::runtime_error&) {
      if (done != count - 1) throw std::logic_error("it returned before the other parts");
      if (run == 1) throw;
    }
  }
}

}  // namespace

void bind_workers(nb::module_& m) {
  m.def("run_parts", &run_parts, nb::call_guard<nb::gil_scoped_release>());
  m.def("run_parts_and_fail", &run_parts_and_fail, nb::call_guard<nb::gil_scoped_release>());
}
