// Arrays and trees of arrays that the engine takes as they are: NumPy's, in dicts, lists and
// tuples. What Python takes 70 us an array for takes two here.
#pragma once

#include <optional>

#include "pccl/bindings/communicator.h"

namespace pccl::bindings {

// A request but for its op and tag, and what it needs.
struct Plain {
  peer::OperationRequest request;
  Arrays in_use;
  nb::object result;  // what the caller gets when it is done
};

// REQUIRES, for all: the GIL. Nothing is returned unless all is plain: arrays of a type that can be
// reduced, C-contiguous, not empty; sends and receives alike; each pair the same memory, or not
// overlapping, and apart from all others. What is wrong then is for the caller to find out.

// One pair of arrays of the same size, of any shapes; no structure.
[[nodiscard]] std::optional<Plain> plain_pair(nb::handle send, nb::handle recv);

// An array, or dicts, lists and tuples of arrays; `out`: as many and of the same shapes, or None
// for new ones. The structure and description are those that pccl.tree makes.
[[nodiscard]] std::optional<Plain> plain_tree(nb::handle tree, nb::handle out);

}  // namespace pccl::bindings
