// The connection to the master: when to dial it, and when it counts as silent or lost. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "pccl/base/error.h"
#include "pccl/base/ids.h"
#include "pccl/base/settings.h"

namespace pccl::peer {

// *one thread: the engine's*
class ControlConnection {
 public:
  // `masters`: how many addresses there are. `id`: makes peers leave a silent master at different
  // times.
  ControlConnection(const Settings& settings, std::uint32_t masters, const PeerId& id)
      : heartbeat_timeout_(settings.heartbeat_timeout),
        reconnect_timeout_(settings.reconnect_timeout),
        masters_(masters),
        patience_(kPatience + kPatience * id.bytes.back() / 256) {}

  enum class Due : std::uint8_t { nothing, dial, silent, elsewhere, lost };

  void start(Instant now) { next_dial_ = now; }
  void on_open(Instant now);
  void on_heard(Instant now) { heard_ = now; }
  // The master has answered a Join or a Rejoin. `waits`: the group has not begun yet.
  void on_welcome(bool waits, Instant now);
  // This peer is a member now: its run has begun.
  void on_member() { look_at_ = Instant::max(); }
  // The master does not serve the group: the next one is dialled. Ends the connection. `recovers`:
  // that master may serve it soon.
  void on_not_serving(bool recovers, Instant now);
  // A master that this member has not followed says that the run went on without it. The next one
  // is dialled, since that master may have been told of an epoch that never existed. Ends the
  // connection.
  void on_refused(const Error& error, Instant now);
  // The connection ended, or a dial failed. `welcomed`: the master had answered on it. True: it was
  // in use. Then its master is dialled once more, unless it was silent.
  bool on_lost(const std::string& reason, bool welcomed, Instant now);
  // This peer has closed the connection.
  void close() { open_ = false; }
  // This peer has closed the connection to ask the other masters again.
  void look_elsewhere(Instant now);
  // Returns the action that is due. `dial`: the dial counts as begun. `member`: a newcomer may wait
  // longer. `elsewhere`: a newcomer waits for a run to begin, and another one may have come to a
  // master meanwhile.
  [[nodiscard]] Due on_time(Instant now, bool member);
  [[nodiscard]] Instant next_deadline() const {
    if (open_ && masters_ > 1 && !answered_) return heard_ + patience_;
    if (open_) return look_at_;
    return dialling_ ? Instant::max() : next_dial_;
  }
  // Which of the addresses is dialled, or was dialled last.
  [[nodiscard]] std::uint32_t at() const { return at_; }
  // Whether this is the first address, and no other one serves a group or is about to.
  [[nodiscard]] bool may_found() const;

  [[nodiscard]] bool is_open() const { return open_; }
  [[nodiscard]] bool was_reached() const { return reached_; }
  // Failed attempts before the master was reached for the first time.
  [[nodiscard]] std::uint32_t failures() const { return failures_; }
  [[nodiscard]] const std::string& failure() const { return failure_; }
  // The error of the last on_refused() since the last on_welcome().
  [[nodiscard]] const std::optional<Error>& refusal() const { return refusal_; }
  // Several masters: none lets this newcomer in, and one of them does not answer. Which one.
  [[nodiscard]] std::optional<std::uint32_t> unanswered() const {
    if (masters_ == 1 || answered_ || unserved_ < masters_ || idle_ >= masters_) return {};
    return failed_at_;
  }

 private:
  // The least time that a master may leave a member without an answer while there are other
  // masters. The most is twice as long.
  static constexpr Duration kPatience = std::chrono::milliseconds(1500);
  void go_on(Instant now, Duration pause);
  // How long the members of a run may need to come from one master to the next.
  [[nodiscard]] Duration takeover_time() const {
    return heartbeat_timeout_ + 2 * kPatience * masters_;
  }

  Duration heartbeat_timeout_;
  Duration reconnect_timeout_;
  std::uint32_t masters_;
  Duration patience_;
  std::uint32_t at_ = 0;
  std::uint32_t misses_ = 0;   // addresses in a row that did not let this peer in
  bool failed_ = false;        // an address in this turn was not reached
  bool first_failed_ = false;  // the first address was not reached in this turn
  // How many of the last addresses did not say that they will serve soon.
  std::uint32_t unserved_ = 0;
  Instant unserved_since_{};
  std::uint32_t idle_ = 0;      // how many of the last addresses answered, but do not serve
  std::uint32_t refusals_ = 0;  // how many of the last addresses refused this member
  std::optional<Error> refusal_;
  Instant turn_since_{};              // when the first address was left
  Instant look_at_ = Instant::max();  // when a newcomer that waits for a run asks the others again
  bool answered_ = false;             // a Welcome, on this connection
  bool silent_ = false;               // on_time() has said so
  bool open_ = false;
  bool dialling_ = false;
  bool reached_ = false;
  Instant lost_at_{};
  Instant heard_{};
  Instant next_dial_{};
  std::uint32_t failures_ = 0;
  std::string failure_;  // why the latest attempt failed
  std::uint32_t failed_at_ = 0;
};

}  // namespace pccl::peer
