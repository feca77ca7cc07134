#include "pccl/base/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>

#include "pccl/base/utf8.h"

namespace pccl {
namespace {

constexpr std::array<std::string_view, 7> kNames = {"TRACE", "DEBUG", "INFO", "WARN",
                                                    "ERR",   "FATAL", "NONE"};
// Names of Python's logging for the same levels.
constexpr std::array<std::pair<std::string_view, LogLevel>, 3> kOtherNames = {
    {{"WARNING", LogLevel::warn}, {"ERROR", LogLevel::err}, {"CRITICAL", LogLevel::fatal}}};
// PIPE_BUF on Linux: longer writes to a pipe may interleave.
constexpr std::size_t kMaxLineBytes = 4096;
constexpr std::uint8_t kUnread = 0xff;
std::atomic<std::uint8_t> level_in_force{kUnread};
constexpr std::array<std::string_view, 4> kFormats = {"auto", "short", "text", "json"};
std::atomic<std::uint8_t> format_in_force{kUnread};
// A file that the program opens later gets a descriptor that is free now.
std::atomic<bool> has_stderr{::fcntl(STDERR_FILENO, F_GETFD) >= 0};

constexpr LineLimit::Bound kLoud{100, 2000};  // warn and above
constexpr LineLimit::Bound kQuiet{5000, 20};  // what the user asked for
constexpr std::size_t kKind = 24;             // bytes of a text that tell its kind

bool is_control(char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7f'; }

// "2026-11-25T02:31:07.123Z". Without the C library's functions, which read the time zone's files.
std::string utc(std::int64_t milliseconds) {
  const std::chrono::sys_time<std::chrono::milliseconds> at{
      std::chrono::milliseconds(milliseconds)};
  const auto day = std::chrono::floor<std::chrono::days>(at);
  const std::chrono::year_month_day date(day);
  const std::chrono::hh_mm_ss time(at - day);
  std::array<char, 40> text{};
  const int size = std::snprintf(
      text.data(), text.size(), "%04d-%02u-%02uT%02d:%02d:%02d.%03dZ",
      static_cast<int>(date.year()), static_cast<unsigned>(date.month()),
      static_cast<unsigned>(date.day()), static_cast<int>(time.hours().count()),
      static_cast<int>(time.minutes().count()), static_cast<int>(time.seconds().count()),
      static_cast<int>(time.subseconds().count()));
  return {text.data(), static_cast<std::size_t>(std::max(size, 0))};
}

// Appends the inside of a JSON string. Once the line would have more than `most` bytes: "...".
void append_json(std::string& line, std::string_view text, std::size_t most) {
  while (!text.empty()) {
    const std::size_t size = utf8_character(text);
    std::string character(size == 0 ? "\xef\xbf\xbd" : text.substr(0, size));
    if (is_control(character[0])) character = " ";
    if (character == "\"" || character == "\\") character.insert(0, "\\");
    if (line.size() + character.size() > most) {
      line.append("...");
      return;
    }
    line.append(character);
    text.remove_prefix(std::max<std::size_t>(size, 1));
  }
}

char upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; }

// Read from PCCL_LOG_FORMAT at first use. Any thread.
LogFormat log_format() {
  std::uint8_t format = format_in_force.load(std::memory_order_relaxed);
  if (format == kUnread) {
    const char* const text = std::getenv("PCCL_LOG_FORMAT");
    LogFormat read = find_log_format(text ? text : "auto").value_or(LogFormat::automatic);
    if (read == LogFormat::automatic)
      read = ::isatty(STDERR_FILENO) == 1 ? LogFormat::brief : LogFormat::text;
    format = static_cast<std::uint8_t>(read);
    format_in_force.store(format, std::memory_order_relaxed);
  }
  return static_cast<LogFormat>(format);
}

}  // namespace

std::optional<LogLevel> find_log_level(std::string_view text) {
  std::string wanted(text);
  std::transform(wanted.begin(), wanted.end(), wanted.begin(), upper);
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == wanted) return static_cast<LogLevel>(i);
  }
  for (const auto& [name, level] : kOtherNames)
    if (name == wanted) return level;
  return std::nullopt;
}

LogLevel log_level() {
  std::uint8_t level = level_in_force.load(std::memory_order_relaxed);
  if (level == kUnread) {
    const char* text = std::getenv("PCCL_LOG_LEVEL");
    const auto read =
        static_cast<std::uint8_t>(find_log_level(text ? text : "").value_or(LogLevel::warn));
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

void disown_stderr() { has_stderr.store(false, std::memory_order_relaxed); }

std::optional<LogFormat> find_log_format(std::string_view text) {
  const auto* const found = std::ranges::find(kFormats, text);
  if (found == kFormats.end()) return std::nullopt;
  return static_cast<LogFormat>(found - kFormats.begin());
}

// -- lines

std::string log_line(LogFormat format, std::int64_t time, LogLevel level, std::string_view who,
                     std::uint64_t epoch, std::string_view text) {
  const std::string_view name = kNames[static_cast<std::size_t>(level)];
  std::string line;
  if (format == LogFormat::json) {
    line.append("{\"time\": \"").append(utc(time)).append("\", \"level\": \"").append(name);
    line.append("\", \"who\": \"");
    append_json(line, who, kMaxLineBytes / 2);
    line.append("\", \"epoch\": ").append(epoch == 0 ? "null" : std::to_string(epoch));
    line.append(", \"text\": \"");
    append_json(line, text, kMaxLineBytes - std::string_view("...\"}\n").size());
    return line.append("\"}\n");
  }
  if (format == LogFormat::text) {
    line.append(utc(time)).append(" ");
    if (epoch != 0) line.append("e").append(std::to_string(epoch)).append(" ");
  }
  line.append("pccl");
  if (!who.empty()) line.append("[").append(who).append("]");
  line.append(" ").append(name).append(": ").append(text);
  if (line.size() > kMaxLineBytes - 1) {
    line.resize(kMaxLineBytes - 4);
    line.append("...");
  }
  std::ranges::replace_if(line, is_control, ' ');
  return line.append("\n");
}

// The generic cell rate algorithm: a line costs an interval, and at_once intervals may be owed.
std::optional<std::uint64_t> LineLimit::take(LogLevel level, std::string_view text,
                                             std::int64_t now_ms) {
  const Bound bound = level >= LogLevel::warn ? kLoud : kQuiet;
  const std::string_view begin = text.substr(0, std::min(text.find_first_of("0123456789"), kKind));
  Kind& kind = kinds_[(std::hash<std::string_view>()(begin) + static_cast<std::size_t>(level)) %
                      kinds_.size()];
  std::int64_t used = kind.used_until.load(std::memory_order_relaxed);
  for (;;) {
    const std::int64_t next = std::max(used, now_ms) + bound.every_ms;
    if (next - now_ms > bound.at_once * bound.every_ms) {
      kind.left_out.fetch_add(1, std::memory_order_relaxed);
      return std::nullopt;
    }
    if (kind.used_until.compare_exchange_weak(used, next, std::memory_order_relaxed))
      return kind.left_out.exchange(0, std::memory_order_relaxed);
  }
}

void log(LogLevel level, std::string_view who, std::string_view text, std::uint64_t epoch) {
  if (!log_enabled(level) || !has_stderr.load(std::memory_order_relaxed)) return;
  static LineLimit limit;
  const auto milliseconds = [](auto since) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(since).count();
  };
  const auto left_out =
      limit.take(level, text, milliseconds(std::chrono::steady_clock::now().time_since_epoch()));
  if (!left_out) return;
  std::string whole;
  if (*left_out > 0) {
    whole = std::string(text) + " (" + std::to_string(*left_out) + " more lines like it left out)";
    text = whole;
  }
  const std::string line =
      log_line(log_format(), milliseconds(std::chrono::system_clock::now().time_since_epoch()),
               level, who, epoch, text);
  while (::write(STDERR_FILENO, line.data(), line.size()) < 0 && errno == EINTR) {
  }
}

}  // namespace pccl
