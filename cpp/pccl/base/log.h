// Lines for the person who runs the program, on stderr. At the default level a healthy run
// prints only what a peer waits for when it starts.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "pccl/base/ids.h"

namespace pccl {

// What a waiting user must know is `warn`. `none` is no level of a line: it silences all of them.
// Values and spellings (TRACE DEBUG INFO WARN ERR FATAL NONE) are level 1's. `fatal` is only a
// level: logging never ends the process.
enum class LogLevel : std::uint8_t { trace = 0, debug, info, warn, err, fatal, none };

// PCCL_LOG_LEVEL's text; any case. Nothing for unknown text.
[[nodiscard]] std::optional<LogLevel> find_log_level(std::string_view text);
// Unknown text is `warn`, so that a misspelling hides nothing.
[[nodiscard]] LogLevel parse_log_level(std::string_view text);

// The least level that is printed, for the whole process. Read from PCCL_LOG_LEVEL at its first
// use; set_log_level (also before that) replaces it. Any thread.
[[nodiscard]] LogLevel log_level();
void set_log_level(LogLevel level);

// Whether a line of this level would be printed: ask before composing an expensive one.
[[nodiscard]] bool log_enabled(LogLevel level);

// Prints `pccl[<who>] <level>: <text>` as one line with one write(2), so that lines of several
// processes never mix; control characters become spaces (others' texts are in there, and terminals
// obey some) and the line is cut at 4096 bytes. Any thread, no locks, no Python. May block as long
// as stderr does; a failing stderr is ignored.
void log(LogLevel level, std::string_view who, std::string_view text);
// `who` is the peer's brief id; with an empty id the prefix is `pccl` alone.
void log(LogLevel level, const PeerId& peer, std::string_view text);

}  // namespace pccl
