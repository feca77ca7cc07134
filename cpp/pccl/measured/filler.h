// Bytes without a meaning. They fill a link while it is measured, or shortly before it is used; the
// receiver discards them.
#pragma once

#include <cstdint>

#include "pccl/link/stripe.h"

namespace pccl::measured {

inline constexpr std::uint32_t kFillerBytes = 32 << 10;

// A frame with so many of them. REQUIRES: bytes <= kFillerBytes.
[[nodiscard]] link::OutgoingFrame filler_frame(std::uint32_t bytes);

}  // namespace pccl::measured
