// Texts for the user, and from the user.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pccl {

// "1 peer", "2 peers".
[[nodiscard]] inline std::string plural(std::size_t count, const std::string& noun,
                                        const char* ending = "s") {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : ending);
}

// "where: why"; `why` alone if it begins with `where` already, as the system's errors may.
[[nodiscard]] inline std::string failure_at(const std::string& where, const std::string& why) {
  return why.starts_with(where + ": ") ? why : where + ": " + why;
}

// Without blanks and line breaks at both ends.
[[nodiscard]] inline std::string_view trim(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const std::size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

}  // namespace pccl
