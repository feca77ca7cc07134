// Instructions that the processor may have.
#pragma once

namespace pccl::os {

// Whether it has instructions for AES-GCM: those of AES, and of multiplication without carry.
// *any thread*
[[nodiscard]] bool has_aes();

}  // namespace pccl::os
