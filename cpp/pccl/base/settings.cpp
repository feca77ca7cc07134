#include "pccl/base/settings.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include "pccl/base/log.h"
#include "pccl/base/name.h"
#include "pccl/os/process.h"

namespace pccl {

namespace {

// Variables that the Python layer, capi/communicator.cpp or io/secret.h read.
constexpr std::array<std::string_view, 9> kReadElsewhere = {
    "PCCL_MASTER", "PCCL_MIN_PEERS",   "PCCL_PORT",          "PCCL_ADVERTISE",     "PCCL_STANDBY",
    "PCCL_SECRET", "PCCL_SECRET_FILE", "PCCL_DRAIN_SECONDS", "PCCL_SIGTERM_STATUS"};
// Prefixes of variables of tests, tools and builds.
constexpr std::array<std::string_view, 6> kForDevelopment = {
    "PCCL_SIM_", "PCCL_STRESS_", "PCCL_C_", "PCCL_SOAK", "PCCL_KILLS", "PCCL_LEAK_"};
constexpr std::size_t kLikelyMeant = 3;  // the largest distance at which a name is suggested

// The Levenshtein distance.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

constexpr double kMaxSeconds = 1e8;  // three years; sums of durations cannot overflow

// Reads variables one after another and keeps the first failure.
class Reader {
 public:
  explicit Reader(const Settings::Lookup& lookup) : lookup_(lookup) {}

  [[nodiscard]] const Status& status() const { return status_; }

  void text(const char* name, std::string& value) {
    if (const auto given = find(name)) value = *given;
  }

  void name(const char* variable, std::string& value) {
    const auto given = find(variable);
    if (!given) return;
    if (!valid_name(*given)) return fail(variable, *given, kNameRule);
    value = *given;
  }

  void seconds(const char* name, Duration& value) {
    const auto given = find(name);
    if (!given) return;
    double number = 0;
    if (!parse(*given, number) || !std::isfinite(number) || number < 1e-3 || number > kMaxSeconds) {
      return fail(name, *given, "seconds between 0.001 and 1e8, such as 2.5");
    }
    value = std::chrono::round<Duration>(std::chrono::duration<double>(number));
  }

  void seconds_or_never(const char* name, Duration& value) {
    const auto given = find(name);
    if (!given || *given != "0") return seconds(name, value);
    value = Duration::zero();
  }

  void seconds(const char* name, std::optional<Duration>& value) {
    const auto given = find(name);
    if (!given) return;
    if (*given == "none") {
      value.reset();
      return;
    }
    Duration read{};
    seconds(name, read);
    if (status_.ok()) value = read;
  }

  template <class Integer>
  void integer(const char* name, Integer& value, Integer least, Integer most) {
    const auto given = find(name);
    if (!given) return;
    Integer number = 0;
    if (!parse(*given, number) || number < least || number > most) {
      return fail(name, *given,
                  "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
    }
    value = number;
  }

  void checksum(const char* name, Checksum& value) {
    const auto given = find(name);
    if (!given) return;
    if (*given != "auto" && *given != "always" && *given != "never")
      return fail(name, *given, "auto, always or never");
    value = *given == "auto"     ? Checksum::automatic
            : *given == "always" ? Checksum::always
                                 : Checksum::never;
  }

  void cipher(const char* name, Cipher& value) {
    const auto given = find(name);
    if (!given) return;
    if (*given != "auto" && *given != "aes" && *given != "chacha20")
      return fail(name, *given, "auto, aes or chacha20");
    value = *given == "auto" ? Cipher::automatic : *given == "aes" ? Cipher::aes : Cipher::chacha20;
  }

  void level(const char* name) {
    const auto given = find(name);
    if (given && !find_log_level(*given))
      fail(name, *given, "TRACE, DEBUG, INFO, WARN, ERR, FATAL or NONE");
  }

  void format(const char* name) {
    const auto given = find(name);
    if (given && !find_log_format(*given)) fail(name, *given, "auto, short, text or json");
  }

  void flag(const char* name, bool& value) {
    const auto given = find(name);
    if (!given) return;
    if (*given != "0" && *given != "1") return fail(name, *given, "0 or 1");
    value = *given == "1";
  }

  void require(bool holds, std::string sentence) {
    if (status_.ok() && !holds) status_ = Status(Code::invalid_argument, std::move(sentence));
  }

 private:
  [[nodiscard]] std::optional<std::string_view> find(const char* name) const {
    const char* text = lookup_(name);
    if (text == nullptr || *text == '\0') return std::nullopt;
    return text;
  }

  // Independent of the locale. False when anything follows the number.
  template <class Number>
  static bool parse(std::string_view text, Number& number) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc() && end == text.data() + text.size();
  }

  void fail(const char* name, std::string_view text, const std::string& wanted) {
    require(false,
            std::string(name) + "=\"" + std::string(text.substr(0, 64)) + "\" is not " + wanted);
  }

  const Settings::Lookup& lookup_;
  Status status_;
};

}  // namespace

Result<Settings> Settings::from(const Lookup& lookup) {
  Settings settings;
  Reader read(lookup);
  read.level("PCCL_LOG_LEVEL");
  read.name("PCCL_NAME", settings.name);
  read.format("PCCL_LOG_FORMAT");
  read.text("PCCL_TRACE", settings.trace);
  read.integer("PCCL_TRACE_MB", settings.trace_mb, 1U, 65536U);
  read.text("PCCL_BIND", settings.bind_address);
  read.seconds("PCCL_HEARTBEAT_INTERVAL", settings.heartbeat_interval);
  read.seconds("PCCL_HEARTBEAT_TIMEOUT", settings.heartbeat_timeout);
  read.seconds("PCCL_RECONNECT_TIMEOUT", settings.reconnect_timeout);
  read.seconds("PCCL_LINK_TIMEOUT", settings.link_timeout);
  read.seconds("PCCL_STRAGGLER_TIMEOUT", settings.straggler_timeout);
  read.seconds("PCCL_REPLAN_INTERVAL", settings.replan_interval);
  read.seconds_or_never("PCCL_MEASURE_AFTER", settings.measure_after);
  read.flag("PCCL_RELAY", settings.relay);
  read.integer("PCCL_RELAY_RATE", settings.relay_rate, std::uint64_t{0}, std::uint64_t{1} << 46);
  read.integer("PCCL_BUFFER_BYTES", settings.buffer_bytes, std::size_t{16} << 10,
               std::size_t{1} << 46);
  read.integer("PCCL_SEGMENT_BYTES", settings.segment_bytes, std::size_t{4} << 10,
               std::size_t{16} << 20);
  read.integer("PCCL_STRIPES", settings.stripes, 0U, 255U);
  read.integer("PCCL_THREADS", settings.threads, 0U, 64U);
  read.text("PCCL_TCP_CONGESTION", settings.tcp_congestion);
  read.flag("PCCL_SHM", settings.shm);
  read.text("PCCL_HOST_ID", settings.host_id);
  read.integer("PCCL_LOCAL_RANK", settings.local_rank, 0U, 0xffffffffU);
  read.seconds("PCCL_TIMEOUT", settings.timeout);
  read.checksum("PCCL_CHECKSUM", settings.checksum);
  read.cipher("PCCL_CIPHER", settings.cipher);
  read.integer("PCCL_KEY_UPDATE_RECORDS", settings.key_update_records, std::uint64_t{1},
               std::uint64_t{1} << 24);
  // Signs of life come up to a quarter of the interval late, and so does who looks for them.
  read.require(settings.heartbeat_timeout >= 2 * settings.heartbeat_interval,
               "PCCL_HEARTBEAT_TIMEOUT must be at least twice PCCL_HEARTBEAT_INTERVAL");
  read.require(settings.segment_bytes % 64 == 0, "PCCL_SEGMENT_BYTES must be a multiple of 64");
  read.require(settings.buffer_bytes / 4 >= settings.segment_bytes,
               "PCCL_BUFFER_BYTES must be at least four times PCCL_SEGMENT_BYTES");
  if (!read.status().ok()) return read.status().error();
  return settings;
}

std::vector<std::string> Settings::unknown(const std::vector<std::string>& names) {
  std::set<std::string, std::less<>> known(kReadElsewhere.begin(), kReadElsewhere.end());
  (void)from([&](const char* name) -> const char* {
    known.insert(name);
    return nullptr;
  });
  std::vector<std::string> sentences;
  for (const std::string& name : names) {
    const auto begins = [&](std::string_view prefix) { return name.starts_with(prefix); };
    if (!begins("PCCL_") || known.contains(name) || std::ranges::any_of(kForDevelopment, begins))
      continue;
    std::string sentence = "there is no setting " + name + ": it is ignored";
    const auto near = std::ranges::min_element(
        known, {}, [&](const std::string& other) { return distance(name, other); });
    if (distance(name, *near) <= kLikelyMeant) sentence += "; did you mean " + *near + "?";
    sentences.push_back(std::move(sentence));
  }
  return sentences;
}

Result<Settings> Settings::from_environment() {
  static std::once_flag warned;
  std::call_once(warned, [] {
    std::vector<std::string> names;
    for (char** entry = os::environment(); entry != nullptr && *entry != nullptr; ++entry) {
      const std::string_view text = *entry;
      names.emplace_back(text.substr(0, text.find('=')));
    }
    for (const std::string& sentence : unknown(names)) log(LogLevel::warn, "", sentence);
  });
  return from([](const char* name) { return std::getenv(name); });
}

}  // namespace pccl
