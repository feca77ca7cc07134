// The clock of the shells. Pure rooms get the time as an argument.
#pragma once

#include <chrono>

#include "pccl/base/ids.h"

namespace pccl {

[[nodiscard]] inline Instant clock_now() { return std::chrono::steady_clock::now(); }

}  // namespace pccl
