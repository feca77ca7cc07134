#include "pccl/reduce/quantize.h"

#include <algorithm>
#include <cstring>

#include "pccl/reduce/kernels.h"

namespace pccl::reduce {
namespace {

// A run has the ranges of its blocks (two numbers each), then its codes.
std::size_t range_bytes(DataType work) { return 2 * element_size(work); }

std::size_t code_bytes(const Quantization& how, std::size_t count) {
  return how.code == CodeType::bits4 ? (count + 1) / 2 : count;
}

std::size_t blocks(const Quantization& how, std::size_t count) {
  return (count + how.block - 1) / how.block;
}

std::size_t kernel_index(DataType work) { return work == DataType::float64 ? 1 : 0; }

template <class W>
void subtract(const void* values, const void* decoded, double scale, void* left,
              std::size_t count) {
  const W* a = static_cast<const W*>(values);
  const W* b = static_cast<const W*>(decoded);
  W* to = static_cast<W*>(left);
  for (std::size_t i = 0; i < count; ++i) {
    const W rest = (a[i] - b[i]) * static_cast<W>(scale);
    to[i] = rest - rest == 0 ? rest : 0;
  }
}

}  // namespace

bool valid(const Quantization& how) {
  return how.code <= CodeType::float8 && how.block >= kMinBlock && how.block <= kMaxBlock &&
         how.block % kMinBlock == 0;
}

std::size_t coded_size(const Quantization& how, DataType work, std::size_t count) {
  return blocks(how, count) * range_bytes(work) + code_bytes(how, count);
}

void encode(const Quantization& how, DataType work, const void* values, std::size_t first,
            std::size_t part, std::size_t count, std::uint64_t seed, void* coded) {
  const EncodeBlock block = kernel_table().encode[kernel_index(work)];
  auto* ranges = static_cast<std::uint8_t*>(coded) + first / how.block * range_bytes(work);
  auto* codes = static_cast<std::uint8_t*>(coded) + blocks(how, count) * range_bytes(work) +
                code_bytes(how, first);
  const auto* from = static_cast<const std::uint8_t*>(values);
  for (std::size_t at = 0; at < part; at += how.block) {
    const std::size_t n = std::min<std::size_t>(how.block, part - at);
    block(how, from, n, seed, first + at, ranges, codes);
    from += n * element_size(work);
    ranges += range_bytes(work);
    codes += code_bytes(how, n);
  }
}

void decode(const Quantization& how, DataType work, const void* coded, std::size_t first,
            std::size_t part, std::size_t count, void* values) {
  const DecodeBlock block = kernel_table().decode[kernel_index(work)];
  const auto* ranges =
      static_cast<const std::uint8_t*>(coded) + first / how.block * range_bytes(work);
  const auto* codes = static_cast<const std::uint8_t*>(coded) +
                      blocks(how, count) * range_bytes(work) + code_bytes(how, first);
  auto* to = static_cast<std::uint8_t*>(values);
  for (std::size_t at = 0; at < part; at += how.block) {
    const std::size_t n = std::min<std::size_t>(how.block, part - at);
    block(how, ranges, codes, n, to);
    to += n * element_size(work);
    ranges += range_bytes(work);
    codes += code_bytes(how, n);
  }
}

void left_out(DataType work, const void* values, const void* decoded, double scale, void* left,
              std::size_t count) {
  work == DataType::float64 ? subtract<double>(values, decoded, scale, left, count)
                            : subtract<float>(values, decoded, scale, left, count);
}

void fit(DataType dtype, void* values, void* elements, std::size_t count) {
  const int index = narrow_index(dtype);
  if (index < 0) return;
  kernel_table().narrow[index](values, elements, count, false);
  reduce(dtype, ReduceOp::sum, elements, {}, 0, values, count);
}

void narrow(DataType dtype, const void* values, void* elements, std::size_t count) {
  if (const int index = narrow_index(dtype); index >= 0)
    return kernel_table().narrow[index](values, elements, count, true);
  if (count != 0) std::memcpy(elements, values, count * element_size(dtype));
}

}  // namespace pccl::reduce
