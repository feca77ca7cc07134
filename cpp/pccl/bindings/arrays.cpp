// Memory for arrays that peers of the host may read directly.
#include "pccl/memory/arrays.h"

#include <nanobind/ndarray.h>

#include <memory>

#include "pccl/bindings/common.h"
#include "pccl/os/shared_memory.h"

namespace pccl::bindings {

void bind_arrays(nb::module_& m) {
  m.def("shares_memory", os::shares_memory);
  m.def(
      "shared_memory",
      [](std::size_t size) -> std::optional<nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>> {
        auto made = memory::make_array(size);
        if (!made) return std::nullopt;
        auto place = std::make_unique<memory::Place>(std::move(*made));
        std::uint8_t* const data = place->chunk->region->data() + place->offset;
        const nb::capsule owner(place.get(), [](void* held) noexcept {
          delete static_cast<memory::Place*>(held);  // NOLINT
        });
        (void)place.release();
        return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(data, {size}, owner);
      },
      "size"_a);
}

}  // namespace pccl::bindings
