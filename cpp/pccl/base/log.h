// Log lines for the user, on stderr. At the default level a healthy run prints only what a starting
// peer waits for.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace pccl {

// Lines that a waiting user must see have `warn`. `none` silences all lines; no line has it.
// Values and spellings (TRACE DEBUG INFO WARN ERR FATAL NONE) are the explicit API's. Logging at
// `fatal` does not end the process.
enum class LogLevel : std::uint8_t { trace = 0, debug, info, warn, err, fatal, none };

// Parses the text of PCCL_LOG_LEVEL, in any case. Empty: unknown text.
[[nodiscard]] std::optional<LogLevel> find_log_level(std::string_view text);
// Like find_log_level; unknown text is `warn`, so that a misspelling hides nothing.
[[nodiscard]] LogLevel parse_log_level(std::string_view text);

// The lowest level that this process prints. Read from PCCL_LOG_LEVEL at first use unless
// set_log_level was called before. Any thread.
[[nodiscard]] LogLevel log_level();
void set_log_level(LogLevel level);

// Whether a line of this level would be printed. Ask before composing an expensive line.
[[nodiscard]] bool log_enabled(LogLevel level);

// `who`: the peer's name, or the part of the program; empty: the prefix is `pccl` alone. Prints
// `pccl[<who>] <level>: <text>` as one line with one write(2), so that lines of several
// processes do not mix. Replaces control characters by spaces (a text may come from another peer,
// and terminals interpret them) and cuts the line at 4096 bytes. Any thread, no locks, no Python.
// May block as long as stderr does; ignores a failing stderr.
void log(LogLevel level, std::string_view who, std::string_view text);
}  // namespace pccl
