#include "pccl/peer/control_connection.h"

#include <utility>

namespace pccl::peer {
namespace {

constexpr Duration kRedial = std::chrono::milliseconds(250);  // a master that was reached before
constexpr Duration kFirstDial = std::chrono::seconds(1);      // a master that was never reached

}  // namespace

void ControlConnection::on_open(Instant now) {
  dialling_ = false;
  open_ = true;
  answered_ = false;
  heard_ = now;
}

// A master that is not reached may have served a group until now. Its members need this time to
// come to another one, which then says so.
bool ControlConnection::may_found() const {
  if (masters_ == 1 || at_ != 0) return false;
  if (idle_ + 1 >= masters_) return true;
  return unserved_ + 1 >= masters_ && turn_since_ - unserved_since_ >= takeover_time();
}

// A newcomer that was let in although a master did not answer must look for its members again: they
// may have come to another one.
void ControlConnection::on_welcome(bool waits, Instant now) {
  const bool unsure = waits && may_found() && idle_ + 1 < masters_;
  look_at_ = unsure ? now + takeover_time() : Instant::max();
  if (!unsure) unserved_ = 0;
  reached_ = true;
  answered_ = true;
  misses_ = idle_ = refusals_ = 0;
  refusal_.reset();
}

void ControlConnection::look_elsewhere(Instant now) {
  open_ = false;
  lost_at_ = now;
  go_on(now, kRedial);
}

// Chooses the next address. After each full turn but the first there is a pause.
void ControlConnection::go_on(Instant now, Duration pause) {
  answered_ = false;
  look_at_ = Instant::max();
  refusals_ = 0;
  if (at_ == 0) turn_since_ = now;
  if (unserved_++ == 0) unserved_since_ = now;
  at_ = (at_ + 1) % masters_;
  ++misses_;
  next_dial_ = now;
  if (misses_ % masters_ != 0) return;
  failed_ = false;
  // Where the first address answers that it cannot tell yet, a newcomer's run may begin.
  if (std::exchange(first_failed_, false) && !reached_) ++failures_;
  if (misses_ > masters_) next_dial_ = now + pause;
}

void ControlConnection::on_not_serving(bool recovers, Instant now) {
  open_ = false;
  if (answered_) lost_at_ = now;  // this peer made way for members of a run that has begun
  if (recovers) failed_ = first_failed_ = false;
  // It serves another run, and may go on to do so.
  if (!recovers && may_found()) failed_ = first_failed_ = true;
  if (idle_ >= masters_) failure_ = "it does not serve the group";
  go_on(now, failed_ && !reached_ ? kFirstDial : kRedial);
  ++idle_;
  if (recovers) idle_ = unserved_ = 0;
}

void ControlConnection::on_refused(const Error& error, Instant now) {
  open_ = false;
  refusal_ = error;
  failed_ = true;
  idle_ = 0;
  const std::uint32_t refusals = refusals_ + 1;
  go_on(now, kRedial);
  refusals_ = refusals;
}

bool ControlConnection::on_lost(const std::string& reason, bool welcomed, Instant now) {
  dialling_ = false;
  failure_ = reason;
  failed_at_ = at_;
  const bool was_open = std::exchange(open_, false);
  // Without an answer, the master counts as lost since the end of the previous connection.
  const bool in_use = was_open && welcomed;
  const bool silent = std::exchange(silent_, false);
  if (in_use) lost_at_ = now;
  // A broken connection alone does not mean that its master is gone.
  if (in_use && (masters_ == 1 || !silent)) {
    answered_ = false;
    look_at_ = Instant::max();
    unserved_ = 0;  // what the other masters said is too old
    next_dial_ = now;
    return true;
  }
  if (masters_ > 1) {
    failed_ = true;
    first_failed_ = first_failed_ || at_ == 0;
    idle_ = 0;
    go_on(now, reached_ ? kRedial : kFirstDial);
    return in_use;
  }
  if (!reached_) {
    ++failures_;
    next_dial_ = now + kFirstDial;
    return false;
  }
  next_dial_ = now + kRedial;
  return false;
}

ControlConnection::Due ControlConnection::on_time(Instant now, bool member) {
  const bool waits = masters_ > 1 && !answered_;
  if (open_ && now - heard_ >= (waits ? patience_ : heartbeat_timeout_)) {
    silent_ = true;
    return Due::silent;
  }
  // A newcomer may have to wait until it may found a run.
  const Duration limit =
      masters_ == 1 || member ? reconnect_timeout_ : reconnect_timeout_ + takeover_time();
  if (reached_ && !answered_ && masters_ > 1 && now - lost_at_ >= limit) return Due::lost;
  if (refusals_ >= masters_) return Due::lost;
  if (open_) return !member && now >= look_at_ ? Due::elsewhere : Due::nothing;
  if (reached_ && now - lost_at_ >= limit) return Due::lost;
  if (dialling_ || now < next_dial_) return Due::nothing;
  dialling_ = true;
  next_dial_ = now + kRedial;
  return Due::dial;
}

}  // namespace pccl::peer
