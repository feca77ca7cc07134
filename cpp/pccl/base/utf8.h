// Texts from other processes need not be UTF-8; those that are cut must stay it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pccl {

// The length of the UTF-8 character at the start of `text`, which is not empty; 0: there is none.
[[nodiscard]] std::size_t utf8_character(std::string_view text);
[[nodiscard]] bool is_utf8(std::string_view text);
// The first characters of `text`, `most` bytes at most.
[[nodiscard]] std::string shortened(std::string_view text, std::size_t most);

}  // namespace pccl
