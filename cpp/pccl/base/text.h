// Parts of sentences in messages to the user.
#pragma once

#include <cstddef>
#include <string>

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

}  // namespace pccl
