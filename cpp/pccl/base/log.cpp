#include "pccl/base/log.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <string>

namespace pccl {

namespace {

constexpr std::array<std::string_view, 7> kNames = {"TRACE", "DEBUG", "INFO", "WARN",
                                                    "ERR",   "FATAL", "NONE"};
// PIPE_BUF on Linux: longer writes to a pipe may interleave.
constexpr std::size_t kMaxLineBytes = 4096;
constexpr std::uint8_t kUnread = 0xff;
std::atomic<std::uint8_t> level_in_force{kUnread};

char upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; }

}  // namespace

std::optional<LogLevel> find_log_level(std::string_view text) {
  std::string wanted(text);
  std::transform(wanted.begin(), wanted.end(), wanted.begin(), upper);
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == wanted) return static_cast<LogLevel>(i);
  }
  return std::nullopt;
}

LogLevel parse_log_level(std::string_view text) {
  return find_log_level(text).value_or(LogLevel::warn);
}

LogLevel log_level() {
  std::uint8_t level = level_in_force.load(std::memory_order_relaxed);
  if (level == kUnread) {
    const char* text = std::getenv("PCCL_LOG_LEVEL");
    const auto read = static_cast<std::uint8_t>(text ? parse_log_level(text) : LogLevel::warn);
    // On failure `level` becomes the value that another thread has set meanwhile.
    if (level_in_force.compare_exchange_strong(level, read, std::memory_order_relaxed))
      level = read;
  }
  return static_cast<LogLevel>(level);
}

void set_log_level(LogLevel level) {
  level_in_force.store(static_cast<std::uint8_t>(level), std::memory_order_relaxed);
}

bool log_enabled(LogLevel level) { return level != LogLevel::none && level >= log_level(); }

void log(LogLevel level, std::string_view who, std::string_view text) {
  if (!log_enabled(level)) return;
  std::string line = "pccl";
  if (!who.empty()) line.append("[").append(who).append("]");
  line.append(" ").append(kNames[static_cast<std::size_t>(level)]).append(": ").append(text);
  if (line.size() > kMaxLineBytes - 1) {
    line.resize(kMaxLineBytes - 4);
    line.append("...");
  }
  std::replace_if(
      line.begin(), line.end(),
      [](char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7f'; }, ' ');
  line.push_back('\n');
  while (::write(STDERR_FILENO, line.data(), line.size()) < 0 && errno == EINTR) {
  }
}

}  // namespace pccl
