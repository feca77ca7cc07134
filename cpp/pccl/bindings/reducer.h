// The shortest way from Python to the engine and back, for reductions that take no longer than
// their preparation.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "pccl/bindings/operation.h"

namespace pccl::bindings {

// REQUIRES, for both: the GIL. Level 2, plain arrays: see plain.h. Where they are not, nothing is
// started, and nothing returned.

// A whole operation: its result, and how it went.
[[nodiscard]] std::optional<std::pair<nb::object, Info>> reduce_tree(
    const std::shared_ptr<Comm>& comm, nb::handle tree, nb::handle out, int op, nb::handle tag,
    Seconds timeout);

// One that has begun, and its result, complete when it is done.
[[nodiscard]] std::optional<std::pair<std::shared_ptr<Operation>, nb::object>> start_tree(
    const std::shared_ptr<Comm>& comm, nb::handle tree, nb::handle out, int op, nb::handle tag,
    Seconds timeout);

}  // namespace pccl::bindings
