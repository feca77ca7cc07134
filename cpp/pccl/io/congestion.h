// The congestion control that a user asks for.
#pragma once

#include <string>

#include "pccl/base/error.h"

namespace pccl::io {

// Whether connections may use the congestion control with this name.
[[nodiscard]] Status check_congestion_control(const std::string& name);

}  // namespace pccl::io
