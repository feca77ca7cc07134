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
  heard_ = now;
}

bool MasterLink::on_lost(const std::string& reason, bool welcomed, Instant now) {
  dialling_ = false;
  failure_ = reason;
  const bool was_open = std::exchange(open_, false);
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
  if (open_) return now - heard_ >= heartbeat_timeout_ ? Due::silent : Due::nothing;
  if (reached_ && now - lost_at_ >= reconnect_timeout_) return Due::lost;
  if (dialling_ || now < next_dial_) return Due::nothing;
  dialling_ = true;
  next_dial_ = now + kRedial;
  return Due::dial;
}

}  // namespace pccl::peer
