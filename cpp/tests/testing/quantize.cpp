// Quantization on byte arrays, so that tests can choose any type and values.
#include "pccl/reduce/quantize.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Input = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

pccl::reduce::Quantization checked(unsigned code, bool zero_exact, bool stochastic,
                                   std::uint32_t block) {
  const pccl::reduce::Quantization how{static_cast<pccl::reduce::CodeType>(code), zero_exact,
                                       stochastic, block};
  if (!pccl::reduce::valid(how) || !how) throw nb::value_error("no such codes");
  return how;
}

pccl::DataType work_of(bool wide) {
  return wide ? pccl::DataType::float64 : pccl::DataType::float32;
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def(
      "coded_size",
      [](unsigned code, std::uint32_t block, bool wide, std::size_t count) {
        return pccl::reduce::coded_size(checked(code, false, false, block), work_of(wide), count);
      },
      "code"_a, "block"_a, "wide"_a, "count"_a);
  // `step`: elements per call, a multiple of the block; 0: all in one call.
  m.def(
      "encode",
      [](unsigned code, bool zero_exact, bool stochastic, std::uint32_t block, bool wide,
         const Input& values, std::uint64_t seed, const Output& coded, std::size_t step) {
        const auto how = checked(code, zero_exact, stochastic, block);
        const pccl::DataType work = work_of(wide);
        const std::size_t element = pccl::element_size(work);
        const std::size_t count = values.size() / element;
        if (coded.size() != pccl::reduce::coded_size(how, work, count) || step % block != 0)
          throw nb::value_error("array of the wrong size");
        const nb::gil_scoped_release release;
        for (std::size_t first = 0; first < count; first += step == 0 ? count : step) {
          const std::size_t part = step == 0 ? count : std::min(step, count - first);
          pccl::reduce::encode(how, work, values.data() + first * element, first, part, count, seed,
                               coded.data());
        }
      },
      "code"_a, "zero_exact"_a, "stochastic"_a, "block"_a, "wide"_a, nb::arg("values").noconvert(),
      "seed"_a, nb::arg("coded").noconvert(), "step"_a = 0);
  m.def(
      "decode",
      [](unsigned code, std::uint32_t block, bool wide, const Input& coded, const Output& values,
         std::size_t step) {
        const auto how = checked(code, false, false, block);
        const pccl::DataType work = work_of(wide);
        const std::size_t element = pccl::element_size(work);
        const std::size_t count = values.size() / element;
        if (coded.size() != pccl::reduce::coded_size(how, work, count) || step % block != 0)
          throw nb::value_error("array of the wrong size");
        const nb::gil_scoped_release release;
        for (std::size_t first = 0; first < count; first += step == 0 ? count : step) {
          const std::size_t part = step == 0 ? count : std::min(step, count - first);
          pccl::reduce::decode(how, work, coded.data(), first, part, count,
                               values.data() + first * element);
        }
      },
      "code"_a, "block"_a, "wide"_a, nb::arg("coded").noconvert(), nb::arg("values").noconvert(),
      "step"_a = 0);
}
