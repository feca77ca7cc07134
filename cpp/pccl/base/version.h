// The name and version of this software, as masters and peers tell them to each other.
#pragma once

namespace pccl {

inline constexpr const char* kSoftware = "pccl " PCCL_VERSION;

}  // namespace pccl
