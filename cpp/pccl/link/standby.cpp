#include "pccl/link/standby.h"

#include <algorithm>
#include <utility>

namespace pccl::link {
namespace {

constexpr std::size_t kKnownEnded = 1024;  // of one link; all lower numbers count as ended
constexpr std::size_t kMaxNotices = 4096;
constexpr std::size_t kMaxUnsettled = 1024;

// False for frames that are useless on another stripe, or are created anew.
bool goes_again(FrameType type) {
  switch (type) {
    case FrameType::hello:
    case FrameType::welcome:
    case FrameType::refused:
    case FrameType::heartbeat:
    case FrameType::ping:
    case FrameType::pong:
    case FrameType::probe:
    case FrameType::offer:
    case FrameType::wanted:  // requested again
    case FrameType::lost:    // moved to the notices when the stripe ended
      return false;
    default:
      return true;
  }
}

}  // namespace

bool Standby::has_ended(std::uint32_t stripe) const {
  return stripe < all_ended_before_ || ended_.contains(stripe);
}

bool Standby::note_ended(std::uint32_t stripe) {
  if (stripe >= all_ended_before_ && !ended_.insert(stripe).second) return false;
  while (ended_.size() > kKnownEnded && !unsettled_.contains(*ended_.begin())) {
    all_ended_before_ = *ended_.begin() + 1;
    ended_.erase(ended_.begin());
  }
  return true;
}

bool Standby::too_many_ended() const { return ended_.size() >= 4 * kKnownEnded; }
bool Standby::too_many_unsettled() const { return unsettled_.size() >= kMaxUnsettled; }
bool Standby::too_many_notices() const { return notices_.size() >= kMaxNotices; }

void Standby::lose(const Lost& notice, LeftFrames left, Instant now) {
  // Notices about other stripes are sent again at once, since both ends may be waiting for them. A
  // notice that arrives twice is ignored. The frames stay in the queue and keep their numbers.
  for (OutgoingFrame& frame : left.frames)
    if (type_of(frame) == FrameType::lost) notices_.push_back(std::move(frame));
  unsettled_[notice.stripe] = {std::move(left), now};
  (void)note_ended(notice.stripe);
  tell(notice);
}

void Standby::tell(const Lost& notice) {
  notices_.push_back(make_checked_frame({.type = FrameType::lost}, wire::encoded(notice)));
}

Result<Standby::Settled> Standby::settle(const Lost& notice) {
  Settled settled;
  const auto it = unsettled_.find(notice.stripe);
  if (it == unsettled_.end()) return settled;
  LeftFrames left = std::move(it->second.left);
  unsettled_.erase(it);
  if (notice.received < left.first || notice.received > left.first + left.frames.size())
    return Error{Code::refused, "an impossible notice of a lost connection"};
  for (std::size_t i = notice.received - left.first; i < left.frames.size(); ++i) {
    OutgoingFrame& frame = left.frames[i];
    if (!goes_again(type_of(frame))) continue;
    if (frame.released) {
      settled.eager_unsent += frame.eager_bytes;
      continue;
    }
    ++settled.sent_again;
    again_.push_back(std::move(frame));
  }
  return settled;
}

bool Standby::overdue(Instant now, Duration patience) const {
  return std::any_of(unsettled_.begin(), unsettled_.end(),
                     [&](const auto& item) { return now - item.second.since >= patience; });
}

bool Standby::next(OutgoingFrame& frame) {
  for (auto* queue : {&notices_, &again_}) {
    if (queue->empty()) continue;
    frame = std::move(queue->front());
    queue->pop_front();
    return true;
  }
  return false;
}

std::uint64_t Standby::release(std::uint64_t token) {
  for (auto& [stripe, unsettled] : unsettled_) link::release(unsettled.left.frames, token);
  std::uint64_t dropped = 0;
  std::erase_if(again_, [&](const OutgoingFrame& frame) {
    if (frame.token != token) return false;
    dropped += frame.eager_bytes;
    return true;
  });
  return dropped;
}

std::uint64_t Standby::unsent(std::uint64_t token) const {
  std::uint64_t bytes = 0;
  for (const OutgoingFrame& frame : again_) bytes += frame.token == token ? frame.payload_bytes : 0;
  return bytes;
}

void Standby::add_unsent(UnsentBytes& by_token) const {
  for (const OutgoingFrame& frame : again_)
    if (frame.token != 0) by_token[frame.token] += frame.payload_bytes;
}

}  // namespace pccl::link
