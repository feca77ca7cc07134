// The shortest way from Python to the engine and back, for reductions that take no longer than
// their preparation.
#pragma once

#include <optional>

#include "pccl/bindings/operation.h"

namespace pccl::bindings {

// A whole operation over one pair of arrays. Nothing is started, and nothing returned, unless all
// is as the engine wants it: arrays of a type that can be reduced, C-contiguous, not empty, alike
// (level 2: in their shapes, too), the same memory or not overlapping; a tag (level 2: or None).
// What is wrong then is for the caller to find out.
[[nodiscard]] std::optional<Info> reduce_plain(const std::shared_ptr<Comm>& comm, nb::handle send,
                                               nb::handle recv, int op, nb::handle tag, int level,
                                               Seconds timeout);

}  // namespace pccl::bindings
