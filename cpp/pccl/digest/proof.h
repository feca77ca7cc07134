// Proves knowledge of a key without disclosing it: SipHash-2-4 with a result of 128 bits.
#pragma once

#include <cstdint>
#include <span>

#include "pccl/base/ids.h"

namespace pccl::digest {

// The keyed hash of `about`. Only a peer that knows `key` can make or check it.
[[nodiscard]] Proof proof(const HostKey& key, std::span<const std::uint64_t> about);

}  // namespace pccl::digest
