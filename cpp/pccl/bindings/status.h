// A run's status as Python's dicts; pccl/_core.pyi has the shape.
#pragma once

#include "pccl/bindings/common.h"
#include "pccl/wire/status.h"

namespace pccl::bindings {

// REQUIRES: the GIL.
[[nodiscard]] nb::dict to_dict(const wire::RunStatus& status);

}  // namespace pccl::bindings
