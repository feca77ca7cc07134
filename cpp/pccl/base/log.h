// Log lines for the user, on stderr. At the default level a healthy run prints only what a starting
// peer waits for.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace pccl {

// Lines that a waiting user must see have `warn`. `none` silences all lines; no line has it.
// Values and spellings (TRACE DEBUG INFO WARN ERR FATAL NONE) are the explicit API's. Logging at
// `fatal` does not end the process.
enum class LogLevel : std::uint8_t { trace = 0, debug, info, warn, err, fatal, none };

// Parses the text of PCCL_LOG_LEVEL, in any case; Python's WARNING, ERROR and CRITICAL, too. Empty:
// unknown text.
[[nodiscard]] std::optional<LogLevel> find_log_level(std::string_view text);

// The lowest level that this process prints. Read from PCCL_LOG_LEVEL at first use unless
// set_log_level was called before; unknown text is `warn`, so that a misspelling hides nothing. Any
// thread.
[[nodiscard]] LogLevel log_level();
void set_log_level(LogLevel level);

// The form of a line, and PCCL_LOG_FORMAT's names for them. Read at the first line; unknown text is
// `automatic`.
enum class LogFormat : std::uint8_t {
  automatic,  // "auto": `brief` if stderr is a terminal, else `text`
  brief,      // "short": pccl[<who>] <level>: <text>
  text,       // "text": <time> e<epoch> pccl[<who>] <level>: <text>; no epoch, no e<epoch>
  json,       // "json": an object with the keys time, level, who, epoch (may be null) and text
};
[[nodiscard]] std::optional<LogFormat> find_log_format(std::string_view text);

// A line as log() prints it, with its line break, at most 4096 bytes. `who` and `text` may have any
// bytes: control characters become spaces, and in JSON what is no UTF-8 becomes U+FFFD. `time`:
// UTC, in milliseconds since 1970. REQUIRES: format is not automatic.
[[nodiscard]] std::string log_line(LogFormat format, std::int64_t time, LogLevel level,
                                   std::string_view who, std::uint64_t epoch,
                                   std::string_view text);

// Bounds the lines of each kind that a process prints, so that no peer and no network can fill a
// disk. A kind is a level and how the text begins, up to its first digit. *any thread*, no locks.
class LineLimit {
 public:
  struct Bound {
    std::int64_t at_once;   // lines
    std::int64_t every_ms;  // one more in each of these intervals
  };
  // Nothing: print no line. Else the number of lines of this kind left out since the last one.
  [[nodiscard]] std::optional<std::uint64_t> take(LogLevel level, std::string_view text,
                                                  std::int64_t now_ms);

 private:
  struct Kind {
    std::atomic<std::int64_t> used_until{0};  // ms: when all lines printed so far are paid for
    std::atomic<std::uint64_t> left_out{0};
  };
  std::array<Kind, 256> kinds_{};  // by hash: kinds may share an entry
};

// Whether a line of this level would be printed. Ask before composing an expensive line.
[[nodiscard]] bool log_enabled(LogLevel level);

// `who`: the peer's name, or the part of the program; empty: the prefix is `pccl` alone. Prints a
// line with one write(2), so that lines of several processes do not mix. Replaces control
// characters by spaces (a text may come from another peer, and terminals interpret them) and cuts
// the line at 4096 bytes. Prints no more lines of a kind than LineLimit allows. `epoch`: 0 if there
// is none. Any thread, no locks, no Python. May block as long as stderr does; ignores a failing
// stderr. Prints nothing if the process has no stderr: if its descriptor was closed when this
// library was loaded, or after disown_stderr.
void log(LogLevel level, std::string_view who, std::string_view text, std::uint64_t epoch = 0);

// The program began without a stderr: a file of its own may have that descriptor. Any thread.
void disown_stderr();

}  // namespace pccl
