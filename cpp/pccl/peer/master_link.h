// The connection to the master: when to dial it, and when it counts as silent or lost. Pure.
#pragma once

#include <cstdint>
#include <string>

#include "pccl/base/ids.h"
#include "pccl/base/settings.h"

namespace pccl::peer {

// *one thread: the engine's*
class MasterLink {
 public:
  explicit MasterLink(const Settings& settings)
      : heartbeat_timeout_(settings.heartbeat_timeout),
        reconnect_timeout_(settings.reconnect_timeout) {}

  enum class Due : std::uint8_t { nothing, dial, silent, lost };

  void start(Instant now) { next_dial_ = now; }
  void on_open(Instant now);
  void on_heard(Instant now) { heard_ = now; }
  // The master has answered a Join or a Rejoin.
  void on_welcome() { reached_ = true; }
  // The connection ended, or a dial failed. `welcomed`: the master had answered on it. True: it was
  // in use.
  bool on_lost(const std::string& reason, bool welcomed, Instant now);
  // This peer has closed the connection.
  void close() { open_ = false; }
  // Returns the action that is due. `dial`: the dial counts as begun.
  [[nodiscard]] Due on_time(Instant now);
  [[nodiscard]] Instant next_deadline() const {
    return open_ || dialling_ ? Instant::max() : next_dial_;
  }

  [[nodiscard]] bool is_open() const { return open_; }
  [[nodiscard]] bool was_reached() const { return reached_; }
  // Failed attempts before the master was reached for the first time.
  [[nodiscard]] std::uint32_t failures() const { return failures_; }
  [[nodiscard]] const std::string& failure() const { return failure_; }

 private:
  Duration heartbeat_timeout_;
  Duration reconnect_timeout_;
  bool open_ = false;
  bool dialling_ = false;
  bool reached_ = false;
  Instant lost_at_{};
  Instant heard_{};
  Instant next_dial_{};
  std::uint32_t failures_ = 0;
  std::string failure_;  // the reason of the latest one
};

}  // namespace pccl::peer
