// Memory of this process alone, in whole pages: large blocks that go back to the system when they
// are freed, and the hints about them with them. All functions: *any thread*.
#pragma once

#include <cstddef>

namespace pccl::os {

// Zeroed memory, in huge pages where the system has them. Null: there is none. REQUIRES, for both:
// `size` is a multiple of 2 MiB, and so of a page.
[[nodiscard]] void* map_pages(std::size_t size);
void unmap_pages(void* at, std::size_t size);

// Gives memory of any kind its pages before they are used, where the system can. Its bytes stay.
void touch_pages(void* at, std::size_t size);

}  // namespace pccl::os
