#include "pccl/base/utf8.h"

namespace pccl {
namespace {

// Whether it is a byte of a character but the first.
bool continues(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

}  // namespace

std::size_t utf8_character(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = at(0);
  const std::size_t size = first < 0x80                     ? 1
                           : first >= 0xc2 && first <= 0xdf ? 2
                           : first >= 0xe0 && first <= 0xef ? 3
                           : first >= 0xf0 && first <= 0xf4 ? 4
                                                            : 0;
  if (size == 0 || size > text.size()) return 0;
  for (std::size_t i = 1; i < size; ++i)
    if (!continues(text[i])) return 0;
  if ((first == 0xe0 && at(1) < 0xa0) || (first == 0xf0 && at(1) < 0x90)) return 0;  // overlong
  if ((first == 0xed && at(1) > 0x9f) || (first == 0xf4 && at(1) > 0x8f)) return 0;  // no character
  return size;
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t size = utf8_character(text);
    if (size == 0) return false;
    text.remove_prefix(size);
  }
  return true;
}

std::string shortened(std::string_view text, std::size_t most) {
  if (text.size() <= most) return std::string(text);
  constexpr std::size_t kLongest = 4;  // bytes of a character
  std::size_t size = most;
  while (size > 0 && most - size < kLongest && continues(text[size])) --size;
  if (continues(text[size])) size = most;  // not UTF-8
  return std::string(text.substr(0, size));
}

}  // namespace pccl
