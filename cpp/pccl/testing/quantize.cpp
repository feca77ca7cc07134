// Codes on byte arrays, so that tests choose type and values freely.
#include "pccl/reduce/quantize.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

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
  m.def(
      "encode",
      [](unsigned code, bool zero_exact, bool stochastic, std::uint32_t block, bool wide,
         const Input& values, std::uint64_t seed, const Output& coded) {
        const auto how = checked(code, zero_exact, stochastic, block);
        const std::size_t count = values.size() / pccl::element_size(work_of(wide));
        if (coded.size() != pccl::reduce::coded_size(how, work_of(wide), count))
          throw nb::value_error("array of the wrong size");
        const nb::gil_scoped_release release;
        pccl::reduce::encode(how, work_of(wide), values.data(), 0, count, count, seed,
                             coded.data());
      },
      "code"_a, "zero_exact"_a, "stochastic"_a, "block"_a, "wide"_a, nb::arg("values").noconvert(),
      "seed"_a, nb::arg("coded").noconvert());
  m.def(
      "decode",
      [](unsigned code, std::uint32_t block, bool wide, const Input& coded, const Output& values) {
        const auto how = checked(code, false, false, block);
        const std::size_t count = values.size() / pccl::element_size(work_of(wide));
        if (coded.size() != pccl::reduce::coded_size(how, work_of(wide), count))
          throw nb::value_error("array of the wrong size");
        const nb::gil_scoped_release release;
        pccl::reduce::decode(how, work_of(wide), coded.data(), 0, count, count, values.data());
      },
      "code"_a, "block"_a, "wide"_a, nb::arg("coded").noconvert(), nb::arg("values").noconvert());
}
