#include "pccl/peer/master_link.h"

#include <utility>

namespace pccl::peer {
namespace {

constexpr Duration kRedial = std::chrono::milliseconds(250);  // a master that was reached before
constexpr Duration kFirstDial = std::chrono::seconds(1);      // a master that was never reached

}  // namespace

void MasterLink::on_open(Instant now) {
  dialling_ = false;
  open_ = true;
  answered_ = false;
  heard_ = now;
}

// Chooses the next address. After each full turn but the first there is a pause.
void MasterLink::go_on(Instant now, Duration pause) {
  answered_ = false;
  at_ = (at_ + 1) % masters_;
  ++misses_;
  ++clear_;
  if (misses_ % masters_ == 0 && std::exchange(failed_, false) && !reached_) ++failures_;
  next_dial_ = misses_ % masters_ == 0 && misses_ > masters_ ? now + pause : now;
}

void MasterLink::on_not_serving(bool recovers, Instant now) {
  open_ = false;
  if (recovers) failed_ = false;
  if (!failed_) failure_ = "it does not serve the group";
  go_on(now, failed_ && !reached_ ? kFirstDial : kRedial);
  if (recovers) clear_ = 0;
}

bool MasterLink::on_lost(const std::string& reason, bool welcomed, Instant now) {
  dialling_ = false;
  failure_ = reason;
  const bool was_open = std::exchange(open_, false);
  if (masters_ > 1) {
    const bool in_use = was_open && welcomed;
    if (in_use) lost_at_ = now;
    failed_ = true;
    go_on(now, reached_ ? kRedial : kFirstDial);
    return in_use;
  }
  if (!reached_) {
    ++failures_;
    next_dial_ = now + kFirstDial;
    return false;
  }
  // Without an answer, the master counts as lost since the end of the previous connection.
  const bool in_use = was_open && welcomed;
  if (in_use) lost_at_ = now;
  next_dial_ = in_use ? now : now + kRedial;
  return in_use;
}

MasterLink::Due MasterLink::on_time(Instant now) {
  const bool waits = masters_ > 1 && !answered_;
  if (open_ && now - heard_ >= (waits ? patience_ : heartbeat_timeout_)) return Due::silent;
  if (reached_ && !answered_ && masters_ > 1 && now - lost_at_ >= reconnect_timeout_)
    return Due::lost;
  if (open_) return Due::nothing;
  if (reached_ && now - lost_at_ >= reconnect_timeout_) return Due::lost;
  if (dialling_ || now < next_dial_) return Due::nothing;
  dialling_ = true;
  next_dial_ = now + kRedial;
  return Due::dial;
}

}  // namespace pccl::peer
