// Which memory a pool of buffers keeps, and memory that is touched ahead, for tests/test_memory.py.
#include "pccl/base/buffer.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "pccl/node/toucher.h"
#include "pccl/os/pages.h"

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

// The part of a block's pages that are in memory.
double resident(const pccl::Buffer& block) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages(block.size() / page);
  if (::mincore(block.data(), block.size(), pages.data()) != 0) throw std::runtime_error("mincore");
  const auto in = std::count_if(pages.begin(), pages.end(), [](auto one) { return one & 1U; });
  return static_cast<double>(in) / static_cast<double>(pages.size());
}

// Has blocks of these sizes, multiples of 4 MiB, touched, one call after the other. Returns the
// part of each block's pages that are in memory before it is touched and after it was. `wanted`:
// otherwise nobody else owns the blocks, and only the number of returned ones is of interest.
std::vector<std::pair<double, double>> touch_ahead(const std::vector<std::size_t>& sizes,
                                                   bool wanted) {
  const auto pool = std::make_shared<pccl::BufferPool>(
      std::size_t{1} << 40, pccl::BufferPool::Pages{pccl::os::map_pages, pccl::os::unmap_pages});
  pccl::node::Toucher toucher;
  std::vector<std::pair<double, double>> parts;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (const std::size_t size : sizes) {
    auto block = std::make_shared<const pccl::Buffer>(pool->take(size));
    const std::weak_ptr<const pccl::Buffer> look = block;
    const double before = resident(*block);
    const pccl::Buffer* const at = block.get();
    toucher.add({block});
    if (!wanted) block.reset();
    while (look.use_count() > (wanted ? 1 : 0)) {
      if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("it holds memory");
      std::this_thread::yield();
    }
    parts.emplace_back(before, wanted ? resident(*at) : 0.0);
  }
  if (!wanted && pool->kept_bytes() == 0) throw std::runtime_error("no block came back");
  return parts;
}

}  // namespace

void bind_buffer(nb::module_& m) {
  m.def("kept_bytes", &kept_bytes);
  m.def("touch_ahead", &touch_ahead, nb::arg("sizes"), nb::arg("wanted"));
}
