// Reduction kernels on byte arrays, so that tests can choose any element type and alignment.
#include "pccl/reduce/reduce.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Input = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void expect_bytes(std::size_t have, std::size_t count, std::size_t element) {
  if (have != count * element) throw nb::value_error("array of the wrong size");
}

void reduce(unsigned dtype, unsigned op, const Input& own,
            const std::vector<std::pair<Input, bool>>& contributions, unsigned divisor,
            const Output& out, std::size_t count) {
  if (dtype >= pccl::kDataTypeCount) throw nb::value_error("no such dtype");
  if (op >= pccl::kReduceOpCount) throw nb::value_error("no such op");
  const auto raw = static_cast<pccl::DataType>(dtype);
  const auto reduce_op = static_cast<pccl::ReduceOp>(op);
  const std::size_t element = pccl::element_size(raw);
  const std::size_t accumulated = pccl::accumulation_size(raw, reduce_op);
  expect_bytes(own.size(), count, element);
  expect_bytes(out.size(), count, divisor == 0 ? accumulated : element);
  std::vector<pccl::reduce::Contribution> inputs;
  for (const auto& [array, is_accumulated] : contributions) {
    expect_bytes(array.size(), count, is_accumulated ? accumulated : element);
    inputs.push_back({array.data(), is_accumulated});
  }
  const nb::gil_scoped_release release;
  pccl::reduce::reduce(raw, reduce_op, own.data(), inputs, divisor, out.data(), count);
}

}  // namespace

void bind_reduce(nb::module_& m) {
  m.def("reduce", &reduce, "dtype"_a, "op"_a, nb::arg("own").noconvert(),
        nb::arg("contributions").noconvert(), "divisor"_a, nb::arg("out").noconvert(), "count"_a);
  m.def("instruction_set", &pccl::reduce::instruction_set);
  m.def("force_instruction_set", &pccl::reduce::force_instruction_set, "name"_a);
}
