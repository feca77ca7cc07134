// Names of peers, for people. Not identities: several peers may have one name.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pccl {

inline constexpr std::size_t kMaxName = 64;
inline constexpr const char* kNameRule = "1 to 64 printable ASCII characters without blanks";

// See kNameRule.
[[nodiscard]] bool valid_name(std::string_view name);
// "hostname-pid".
[[nodiscard]] std::string default_name();

}  // namespace pccl
