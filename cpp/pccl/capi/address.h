// Addresses of pccl.h <-> addresses of the library.
#pragma once

#include "pccl.h"
#include "pccl/base/error.h"
#include "pccl/wire/records.h"

namespace pccl::capi {

[[nodiscard]] Result<wire::Address> from_c(const ccoip_socket_address_t& address);
// The host may be a name, which is looked up; that may block.
[[nodiscard]] Result<ccoip_socket_address_t> to_c(const wire::Address& address);

}  // namespace pccl::capi
