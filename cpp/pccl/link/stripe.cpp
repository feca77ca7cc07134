#include "pccl/link/stripe.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "pccl/digest/xxh3.h"

namespace pccl::link {
namespace {

constexpr std::size_t kFillerBytes = 256 << 10;
constexpr std::size_t kReadAheadBytes = 8 << 10;
constexpr std::size_t kBatchBytes = 1 << 20;    // written in one system call
constexpr std::size_t kLittleBytes = 64 << 10;  // queued when another stripe may be faster
constexpr std::size_t kBatchVectors = 64;
constexpr std::uint64_t kTellFrames = 32;
constexpr std::uint64_t kTellBytes = 4 << 20;
constexpr std::uint64_t kVoidToken = ~std::uint64_t{0};  // of a frame given up half-way

// Completes half-sent frames of an operation that has ended.
const std::uint8_t* filler() {
  static const std::vector<std::uint8_t> zeros(kFillerBytes, 0);
  return zeros.data();
}

constexpr std::array<std::uint8_t, kTrailerBytes> trailer_bytes(std::uint64_t value) {
  std::array<std::uint8_t, kTrailerBytes> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::uint8_t>(value >> (8 * i));
  return bytes;
}
constexpr auto kValid = trailer_bytes(kTrailerValid);
constexpr auto kVoid = trailer_bytes(kTrailerVoid);

void seal(OutgoingFrame& frame) {
  frame.checksum_due = false;
  FrameHeader header = *decode(frame.header);
  header.checksum = checksum(header, frame.payload);
  frame.header = encode(header);
}

std::size_t frame_bytes(const OutgoingFrame& frame) {
  return kFrameHeaderBytes + frame.payload_bytes + (frame.trailer ? kTrailerBytes : 0);
}

}  // namespace

OutgoingFrame make_frame(const FrameHeader& header, wire::Bytes payload) {
  OutgoingFrame frame;
  FrameHeader full = header;
  full.payload_bytes = static_cast<std::uint32_t>(payload.size());
  frame.header = encode(full);
  frame.payload_bytes = full.payload_bytes;
  frame.owned = std::move(payload);
  return frame;
}

OutgoingFrame make_checked_frame(FrameHeader header, wire::Bytes payload) {
  const iovec whole{payload.data(), payload.size()};
  header.payload_bytes = static_cast<std::uint32_t>(payload.size());
  header.checksum = checksum(header, {&whole, 1});
  return make_frame(header, std::move(payload));
}

FrameType type_of(const OutgoingFrame& frame) {
  return static_cast<FrameType>(frame.header[4]);  // docs/internals/protocol.md
}

void release(std::deque<OutgoingFrame>& frames, std::uint64_t token) {
  for (OutgoingFrame& frame : frames) {
    if (frame.token != token) continue;
    frame.released = true;
    frame.payload.clear();
    frame.packed = {};
  }
}

std::uint64_t checksum(const FrameHeader& header, std::span<const iovec> payload) {
  FrameHeader plain = header;
  plain.checksum = 0;
  const auto bytes = encode(plain);
  const std::uint64_t sum = digest::xxh3_64(bytes, payload);
  return sum == 0 ? 1 : sum;  // 0 means "not checked"
}

// -- writing

std::size_t Stripe::gathered_bytes() const {
  std::size_t bytes = 0;
  for (const OutgoingFrame& frame : queue_) bytes += frame_bytes(frame);
  return bytes - std::min(bytes, front_sent_);
}

void Stripe::gather() {
  std::size_t ready = gathered_bytes();
  const std::size_t enough = keeps_ ? kLittleBytes : kBatchBytes;
  while (ready < enough && queue_.size() < kBatchVectors / 4) {
    OutgoingFrame frame;
    if (!traffic_.next(*this, frame)) break;
    ready += frame_bytes(frame);
    queue_.push_back(std::move(frame));
  }
}

std::span<const iovec> Stripe::gathered() {
  out_.clear();
  std::size_t skip = front_sent_;
  const auto add = [&](const void* data, std::size_t size) {
    const std::size_t skipped = std::min(skip, size);
    skip -= skipped;
    if (size > skipped && out_.size() < kBatchVectors)
      out_.push_back(vec(static_cast<const std::uint8_t*>(data) + skipped, size - skipped));
  };
  for (OutgoingFrame& frame : queue_) {
    if (out_.size() >= kBatchVectors) break;
    if (frame.checksum_due) seal(frame);
    add(frame.header.data(), frame.header.size());
    if (frame.owned.empty()) {
      for (const iovec& part : frame.payload) add(part.iov_base, part.iov_len);
    } else {
      add(frame.owned.data(), frame.owned.size());
    }
    if (frame.trailer) {
      const auto& mark = frame.token == kVoidToken ? kVoid : kValid;
      add(mark.data(), mark.size());
    }
  }
  return out_;
}

void Stripe::sent(std::size_t bytes) {
  bytes_sent_ += bytes;
  front_sent_ += bytes;
  while (!queue_.empty() && front_sent_ >= frame_bytes(queue_.front())) {
    front_sent_ -= frame_bytes(queue_.front());
    if (keeps_) sent_.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
}

bool Stripe::owes_confirmation() const {
  return keeps_ && (frames_received_ - frames_told_ >= kTellFrames ||
                    bytes_received_ - bytes_told_ >= kTellBytes);
}

void Stripe::push_heartbeat() {
  frames_told_ = frames_received_;
  bytes_told_ = bytes_received_;
  push(make_frame({.type = FrameType::heartbeat, .attempt = frames_received_}));
}

bool Stripe::confirm(std::uint64_t frames) {
  if (!keeps_) return true;
  if (frames > confirmed_ + sent_.size()) return false;
  for (; confirmed_ < frames; ++confirmed_) sent_.pop_front();
  return true;
}

LeftFrames Stripe::end() {
  if (phase_ == Phase::payload && placement_.kind == Placement::Kind::store)
    traffic_.interrupted(*this, header_, placement_.token);
  placement_ = {};
  phase_ = Phase::held;
  LeftFrames left{confirmed_, std::exchange(sent_, {})};
  for (OutgoingFrame& frame : queue_) left.frames.push_back(std::move(frame));
  queue_.clear();
  return left;
}

std::uint64_t Stripe::unsent(std::uint64_t token) const {
  std::uint64_t bytes = 0;
  for (const OutgoingFrame& frame : queue_) bytes += frame.token == token ? frame.payload_bytes : 0;
  return bytes;
}

void Stripe::add_unsent(UnsentBytes& by_token) const {
  for (const OutgoingFrame& frame : queue_)
    if (frame.token != 0) by_token[frame.token] += frame.payload_bytes;
}

std::uint64_t Stripe::release(std::uint64_t token) {
  std::uint64_t dropped = 0;
  for (std::size_t i = queue_.size(); i-- > 0;) {
    OutgoingFrame& frame = queue_[i];
    if (frame.token != token) continue;
    if (i > 0 || front_sent_ == 0) {
      dropped += frame.eager_bytes;
      queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(i));
      continue;
    }
    // The receiver has the frame's length. Send filler for the rest of the payload and void the
    // frame. If the whole payload is written, keep the valid trailer: part of it may be written
    // too.
    frame.token = front_sent_ >= kFrameHeaderBytes + frame.payload_bytes ? 0 : kVoidToken;
    frame.released = true;
    frame.payload.clear();
    frame.packed = {};
    for (std::size_t left = frame.payload_bytes; left > 0;) {
      const std::size_t size = std::min(left, kFillerBytes);
      frame.payload.push_back(vec(filler(), size));
      left -= size;
    }
  }
  link::release(sent_, token);
  if (phase_ == Phase::payload && placement_.kind == Placement::Kind::store &&
      placement_.token == token) {
    drain_rest();
    // Another peer may deliver the chunk at once. drained() accounts for this frame when it ends.
    if (header_.type == FrameType::state) traffic_.voided(*this, header_, token);
  }
  return dropped;
}

// -- reading

std::span<const iovec> Stripe::incoming() {
  in_.clear();
  switch (phase_) {
    case Phase::held:
      break;
    case Phase::header:
      if (ahead_.empty()) ahead_.resize(kReadAheadBytes);
      in_.push_back(vec(header_bytes_.data() + header_filled_, kFrameHeaderBytes - header_filled_));
      in_.push_back(vec(ahead_.data(), ahead_.size()));
      break;
    case Phase::payload:
      // Read the next header with the same system call.
      for (std::size_t i = rest_at_; i < rest_.size() && in_.size() < kBatchVectors; ++i)
        in_.push_back(rest_[i]);
      if (rest_.size() - rest_at_ < kBatchVectors)
        in_.push_back(vec(header_bytes_.data(), kFrameHeaderBytes));
      break;
  }
  return in_;
}

std::size_t Stripe::payload_left() const {
  std::size_t left = 0;
  if (phase_ == Phase::payload)
    for (std::size_t i = rest_at_; i < rest_.size(); ++i) left += rest_[i].iov_len;
  return left;
}

void Stripe::check(std::size_t bytes) {
  if (phase_ != Phase::payload || placement_.kind != Placement::Kind::store ||
      header_.checksum == 0 || !carries_data(header_.type))
    return;
  if (bytes >= payload_left()) checked_ = checksum(header_, placement_.where);
}

std::size_t Stripe::skip_payload(std::size_t bytes) {
  std::size_t taken = 0;
  while (bytes > 0 && rest_at_ < rest_.size()) {
    iovec& part = rest_[rest_at_];
    const std::size_t size = std::min(bytes, part.iov_len);
    part.iov_base = static_cast<std::uint8_t*>(part.iov_base) + size;
    part.iov_len -= size;
    bytes -= size;
    taken += size;
    if (part.iov_len == 0) ++rest_at_;
  }
  return taken;
}

Status Stripe::received(std::size_t bytes) {
  bytes_received_ += bytes;
  if (phase_ == Phase::header) {
    const std::size_t size = std::min(bytes, kFrameHeaderBytes - header_filled_);
    header_filled_ += size;
    ahead_at_ = 0;
    ahead_end_ = bytes - size;
    if (header_filled_ < kFrameHeaderBytes) return {};
    if (Status status = take_header(); !status) return status;
    return take_ahead();
  }
  bytes -= skip_payload(bytes);
  if (rest_at_ < rest_.size()) return {};
  header_filled_ = bytes;
  if (Status status = finish_frame(); !status) return status;
  if (header_filled_ < kFrameHeaderBytes) return {};
  return take_header();
}

// Parses the bytes read together with a header, until none is left or the stripe is held.
Status Stripe::take_ahead() {
  while (ahead_at_ < ahead_end_ && phase_ != Phase::held) {
    const std::size_t left = ahead_end_ - ahead_at_;
    if (phase_ == Phase::header) {
      const std::size_t size = std::min(left, kFrameHeaderBytes - header_filled_);
      std::memcpy(header_bytes_.data() + header_filled_, ahead_.data() + ahead_at_, size);
      header_filled_ += size;
      ahead_at_ += size;
      if (header_filled_ < kFrameHeaderBytes) return {};
      if (Status status = take_header(); !status) return status;
      continue;
    }
    iovec& part = rest_[rest_at_];
    const std::size_t size = std::min(left, part.iov_len);
    std::memcpy(part.iov_base, ahead_.data() + ahead_at_, size);
    ahead_at_ += size;
    skip_payload(size);
    if (rest_at_ == rest_.size()) {
      header_filled_ = 0;
      if (Status status = finish_frame(); !status) return status;
    }
  }
  return {};
}

Status Stripe::take_header() {
  const auto header = decode(header_bytes_);
  if (!header) return header.error();
  header_ = *header;
  header_filled_ = 0;
  return place_payload();
}

Status Stripe::place_payload() {
  placement_ = {};
  rest_.clear();
  rest_at_ = 0;
  if (!carries_data(header_.type)) {
    if (header_.payload_bytes == 0) {
      phase_ = Phase::header;
      ++frames_received_;
      return traffic_.control(*this, header_, {});
    }
    small_.resize(header_.payload_bytes);
    rest_.push_back(vec(small_.data(), small_.size()));
    phase_ = Phase::payload;
    return {};
  }
  placement_ = traffic_.place(*this, header_);
  switch (placement_.kind) {
    case Placement::Kind::refuse:
      return Status(Code::refused, placement_.reason);
    case Placement::Kind::hold:
      phase_ = Phase::held;
      return {};
    case Placement::Kind::drain: {
      phase_ = Phase::payload;
      rest_.push_back(vec(nullptr, header_.payload_bytes));
      rest_.push_back(vec(trailer_.data(), trailer_.size()));
      drain_rest();
      return {};
    }
    case Placement::Kind::store:
      break;
  }
  phase_ = Phase::payload;
  for (const iovec& part : placement_.where) {
    if (part.iov_len > 0) rest_.push_back(part);
  }
  rest_.push_back(vec(trailer_.data(), trailer_.size()));
  return {};
}

// Redirects the rest of the payload, without the trailer, to memory that is discarded.
void Stripe::drain_rest() {
  placement_.kind = Placement::Kind::drain;
  if (rest_at_ + 1 < rest_.size()) {
    if (!drain_) drain_ = std::make_unique<std::uint8_t[]>(kFillerBytes);
    std::size_t left = 0;
    for (std::size_t i = rest_at_; i + 1 < rest_.size(); ++i) left += rest_[i].iov_len;
    const iovec trailer = rest_.back();
    rest_.clear();
    rest_at_ = 0;
    for (; left > 0; left -= std::min(left, kFillerBytes)) {
      rest_.push_back(vec(drain_.get(), std::min(left, kFillerBytes)));
    }
    rest_.push_back(trailer);
  }
  placement_.buffer = {};
  placement_.where.clear();
}

Status Stripe::finish_frame() {
  phase_ = Phase::header;
  if (!carries_data(header_.type)) {
    const iovec whole = vec(small_.data(), small_.size());
    if (header_.checksum != 0 && checksum(header_, {&whole, 1}) != header_.checksum)
      return Status(Code::unreachable, "a frame's checksum is wrong");
    ++frames_received_;
    return traffic_.control(*this, header_, small_);
  }
  Placement full = std::exchange(placement_, {});
  const std::optional<std::uint64_t> known = std::exchange(checked_, std::nullopt);
  const bool stored = full.kind == Placement::Kind::store;
  const bool valid = trailer_ == kValid;
  const char* spoilt = nullptr;
  if (!valid && trailer_ != kVoid) {
    spoilt = "a data frame does not end in a trailer";
  } else if (stored && valid && header_.checksum != 0 && known.value_or(0) != header_.checksum &&
             checksum(header_, full.where) != header_.checksum) {
    spoilt = "a data frame's checksum is wrong";
  }
  if (spoilt != nullptr) {
    if (stored) traffic_.interrupted(*this, header_, full.token);
    return Status(Code::unreachable, spoilt);
  }
  ++frames_received_;
  if (stored && valid) return traffic_.arrived(*this, header_, full.token, std::move(full.buffer));
  if (stored) {
    traffic_.voided(*this, header_, full.token);
  } else {
    traffic_.drained(*this, header_);
  }
  return {};
}

Status Stripe::resume() {
  if (phase_ != Phase::held) return {};
  if (Status status = place_payload(); !status) return status;
  return take_ahead();
}

}  // namespace pccl::link
