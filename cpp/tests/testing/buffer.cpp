// Which memory a pool of buffers keeps, for tests/test_memory.py.
#include "pccl/base/buffer.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace nb = nanobind;

namespace {

// Takes and gives back a buffer of each size. Returns the bytes kept after each.
std::vector<std::size_t> kept_bytes(std::size_t keep, const std::vector<std::size_t>& sizes) {
  const auto pool = std::make_shared<pccl::BufferPool>(keep);
  std::vector<std::size_t> kept;
  for (const std::size_t size : sizes) {
    { const pccl::Buffer buffer = pool->take(size); }
    kept.push_back(pool->kept_bytes());
  }
  return kept;
}

}  // namespace

void bind_buffer(nb::module_& m) { m.def("kept_bytes", &kept_bytes); }
