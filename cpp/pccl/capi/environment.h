// Variables that in Python stand for arguments, and for which pccl.h has none.
#pragma once

#include <cstdint>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/wire/records.h"

namespace pccl::capi {

// PCCL_PORT; 0: any.
[[nodiscard]] Result<std::uint16_t> own_port();
// PCCL_ADVERTISE: "host[:port],...".
[[nodiscard]] Result<std::vector<wire::Address>> advertised();

}  // namespace pccl::capi
