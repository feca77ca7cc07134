// NumPy arrays, and dicts, lists and tuples of them, which the engine takes as they are. Python
// needs 70 us an array for the same work, this file 2 us or less.
#pragma once

#include <optional>
#include <string_view>

#include "pccl/bindings/communicator.h"

namespace pccl::bindings {

// A request without its op and tag.
struct Plain {
  peer::OperationRequest request;
  Arrays in_use;
  Held result;  // for the caller, when the operation is done
};

// REQUIRES, for all: the GIL. They return nothing unless all arrays are plain: of a type that can
// be reduced, C-contiguous and not empty; a pair has equal types and sizes, and is either the same
// memory or does not overlap; different pairs do not overlap. The caller finds out what is wrong.

// One pair of arrays of the same size, of any shapes; no structure.
[[nodiscard]] std::optional<Plain> plain_pair(nb::handle send, nb::handle recv);

// An array, or dicts, lists and tuples of arrays; `out`: as many and of the same shapes, or None
// for new ones. The structure and description are those that pccl.tree makes, with `coding`, the
// words for how elements are sent, as pccl.reduce.request adds them.
[[nodiscard]] std::optional<Plain> plain_tree(nb::handle tree, nb::handle out,
                                              std::string_view coding);

// One array for another collective of so many members, and `out` for its result; None: a new one.
// If not `shaped`, only sizes must fit. The kind, the number of parts, the structure and the
// description are set as pccl.collectives sets them. `array` and `out` share no memory, except in a
// broadcast in place.
[[nodiscard]] std::optional<Plain> plain_parts(collective::Kind kind, std::uint32_t members,
                                               nb::handle array, nb::handle out, bool shaped);

}  // namespace pccl::bindings
