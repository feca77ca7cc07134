// Memory that processes of one host share: anonymous files, which are passed on as descriptors and
// sealed, so that no process can harm another one through them. All functions: *any thread*.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pccl::os {

// Whether this system can share memory in that way. If not, peers of one host use TCP, memory of a
// process stays its own, and the functions up to most_shared_memory() fail with ENOTSUP.
[[nodiscard]] bool shares_memory();

// A new empty file without a name, closed by exec. -1: errno.
[[nodiscard]] int open_shared_memory();

// Takes the memory for a file of that size now, where the system promises no more memory than it
// has. It would otherwise find out at the first access that there is none, and end the process
// (SIGBUS). Where the system promises more, it does nothing. Returns 0, or the error's number:
// ENOSPC, or ENOTSUP where memory cannot be shared.
[[nodiscard]] int reserve(int descriptor, std::size_t size);

// Fixes the file's size for ever and, with `writes`, forbids all later mappings that can write. -1:
// errno.
[[nodiscard]] int seal(int descriptor, bool writes);
// 1: it is sealed in that way. 0: it is not. -1: errno.
[[nodiscard]] int is_sealed(int descriptor, bool writes);

// No valid file can be larger, in bytes. 0: not known.
[[nodiscard]] std::uint64_t most_shared_memory();

// Hints about mapped memory. A system that lacks one ignores it.

// Forked children do not get the mapping: they would keep the memory as long as they live.
void keep_from_children(void* at, std::size_t size);
// Forked children get it, like all other memory.
void give_to_children(void* at, std::size_t size);
// Uses huge pages where the memory is at least as long as one.
void use_huge_pages(void* at, std::size_t size);

}  // namespace pccl::os
