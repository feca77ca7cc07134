// The executor's part for received frames: where payloads go, and what has arrived, also for
// operations that are not called here yet.
#include <algorithm>
#include <utility>

#include "pccl/collective/executor.h"

namespace pccl::collective {
namespace {

// Bounds for one peer, on operations not called here: as many as may be open (master/limits.h).
constexpr std::size_t kMaxEarlyOperations = 1 << 16;
constexpr std::size_t kMaxEarlyFrames = 1 << 16;
// Control frames that wait to be sent to one peer: one for each operation that may be open.
constexpr std::size_t kMaxWords = 1 << 16;

}  // namespace

void Executor::eager_consumed(const PeerId& from, std::uint64_t bytes) {
  Port& port = ports_[from];
  port.eager_used += bytes;
  if (port.eager_used >= options_.eager_room / 4) links_.wake(from);
}

void Executor::forget_frames(const PeerId& from, const Early& early) {
  for (const EarlyFrame& frame : early.frames) unkeep(from, frame.header.payload_bytes);
  early_.at(from).frames -= early.frames.size();
}

void Executor::drop_early(const wire::OpKey& key) {
  for (auto& [peer, said] : early_) {
    const auto it = said.operations.find(key);
    if (it == said.operations.end()) continue;
    forget_frames(peer, it->second);
    said.operations.erase(it);
  }
}

link::Placement Executor::place(const PeerId& from, const link::FrameHeader& header, bool called) {
  link::Placement placement;
  const auto refuse = [&](std::string why) {
    placement.kind = link::Placement::Kind::refuse;
    placement.reason = std::move(why);
    return std::move(placement);
  };
  const auto drain = [&] {
    placement.kind = link::Placement::Kind::drain;
    return std::move(placement);
  };
  if (header.payload_bytes == 0) return refuse("an empty data frame");
  if (header.attempt > epoch_) {
    placement.kind = link::Placement::Kind::hold;
    return placement;
  }
  if (header.attempt < abort_floor_ || header.key.admission != admission_) return drain();
  RunningAttempt* attempt = find(header.key);
  if (attempt == nullptr) {
    if (called) return drain();
    if (header.final && !header.eager)
      return refuse("final bytes for an operation that was not called here");
    Port& port = ports_[from];
    if (!header.eager || port.eager_kept + header.payload_bytes > options_.eager_room) {
      return refuse("data for an operation that was not called here, beyond the room for it");
    }
    const auto said = early_.find(from);
    if (!room_for_early(from, header.key) ||
        (said != early_.end() && said->second.frames >= kMaxEarlyFrames))
      return refuse("data for too many operations not called here");
    port.eager_kept += header.payload_bytes;
    placement.kind = link::Placement::Kind::store;
    placement.buffer = pool_->take(header.payload_bytes);
    placement.where = {link::vec(placement.buffer.data(), header.payload_bytes)};
    return placement;
  }
  if (attempt->spec.signature != header.signature) {
    // The master compares signatures and names the member that differs. Until then nothing is
    // mixed.
    events_.disagreement = true;
    return drain();
  }
  if (attempt->spec.attempt != header.attempt) return drain();
  if (header.segment >= attempt->layout.segments.size())
    return refuse("a segment beyond the operation's end");
  const Segment& segment = attempt->layout.segments[header.segment];
  const ChunkFlow& flow = attempt->schedule.chunks[segment.chunk];
  SegmentState& state = attempt->segments[header.segment];
  placement.token = attempt->token;
  if (header.final) {
    const auto rank = attempt->ranks.find(from);
    if (rank == attempt->ranks.end() || flow.final_from != rank->second) {
      return refuse("final bytes from a peer that does not have them");
    }
    if (header.payload_bytes != attempt->result_bytes(header.segment))
      return refuse("a segment of the wrong length");
    // The memory of these final bytes may hold a partial result that is still to be passed on. An
    // honest owner has no final bytes before it has that.
    if (state.missing > 0) return refuse("final bytes before this peer's contribution");
    if (state.arrived) return drain();
    hear(*attempt, rank->second);
    placement.kind = link::Placement::Kind::store;
    if (segment.piece_count > kMaxPieces || attempt->spec.quantization) {
      placement.buffer = pool_->take(header.payload_bytes);
      placement.where = {link::vec(placement.buffer.data(), header.payload_bytes)};
      return placement;
    }
    attempt->result_memory(segment, segment.chunk, placement);
    return placement;
  }
  const std::uint32_t source = attempt->source_index(header.segment, from);
  if (source == kNoSource) return refuse("a contribution from a peer that makes none");
  if (header.payload_bytes != attempt->received_bytes(header.segment, flow.sources[source]))
    return refuse("a segment of the wrong length");
  if (state.seen[source]) return drain();
  if (const auto granted = attempt->granted.find(from); granted != attempt->granted.end()) {
    if (granted->second == 0) return refuse("a segment that there was no room for yet");
    --granted->second;
  }
  hear(*attempt, flow.sources[source].rank);
  placement.kind = link::Placement::Kind::store;
  if (attempt->in_result(segment, flow.sources[source])) {
    attempt->result_memory(segment, flow.sources[source].rank, placement);
    return placement;
  }
  placement.buffer = pool_->take(header.payload_bytes);
  placement.where = {link::vec(placement.buffer.data(), header.payload_bytes)};
  return placement;
}

// Frees the room of early data.
void Executor::unkeep(const PeerId& from, std::uint64_t bytes) {
  Port& port = ports_[from];
  port.eager_kept -= std::min(port.eager_kept, bytes);
  eager_consumed(from, bytes);
}

Status Executor::arrived(const PeerId& from, const link::FrameHeader& header, std::uint64_t token,
                         Buffer buffer, bool called) {
  RunningAttempt* attempt = find(header.key);
  if (token == 0) {
    // The frame was placed before the operation was called here. By now it may be running, or over.
    if (header.attempt < abort_floor_ || header.key.admission != admission_ ||
        (attempt == nullptr && called)) {
      unkeep(from, header.payload_bytes);
      return {};
    }
    Early& early = early_for(from, header);
    early.frames.push_back({header, std::move(buffer)});
    ++early_.at(from).frames;
    if (attempt != nullptr) use_early(*attempt);
    return {};
  }
  // release() drains frames of operations that have ended, so this one is running.
  if (attempt == nullptr || attempt->token != token) return {};
  attempt->traffic.rx_bytes += header.payload_bytes;
  if (header.eager) eager_consumed(from, header.payload_bytes);
  if (header.final) {
    final_bytes(*attempt, header.segment, std::move(buffer));
  } else {
    contribution(*attempt, header.segment, attempt->source_index(header.segment, from),
                 std::move(buffer));
  }
  return {};
}

// Takes back the use of a grant: the contribution was placed but will not be complete.
void Executor::ungrant(const PeerId& from, const link::FrameHeader& header, std::uint64_t token) {
  RunningAttempt* attempt = find(header.key);
  if (header.final || attempt == nullptr || attempt->token != token) return;
  const auto granted = attempt->granted.find(from);
  if (granted != attempt->granted.end()) granted->second = plus(granted->second, 1);
}

void Executor::voided(const PeerId& from, const link::FrameHeader& header, std::uint64_t token) {
  ungrant(from, header, token);
  if (!header.eager) return;
  if (token == 0) {
    unkeep(from, header.payload_bytes);
  } else {
    eager_consumed(from, header.payload_bytes);
  }
}

void Executor::drained(const PeerId& from, const link::FrameHeader& header) {
  if (header.eager) eager_consumed(from, header.payload_bytes);
}

void Executor::interrupted(const PeerId& from, const link::FrameHeader& header,
                           std::uint64_t token) {
  ungrant(from, header, token);
  if (!header.eager || token != 0) return;
  Port& port = ports_[from];
  port.eager_kept -= std::min<std::uint64_t>(port.eager_kept, header.payload_bytes);
}

void Executor::eager_unsent(const PeerId& to, std::uint64_t bytes) {
  Port& port = ports_[to];
  port.eager_out -= std::min(port.eager_out, bytes);
}

bool Executor::room_for_early(const PeerId& from, const wire::OpKey& key) const {
  const auto said = early_.find(from);
  return said == early_.end() || said->second.operations.size() < kMaxEarlyOperations ||
         said->second.operations.contains(key);
}

// The entry for early frames of this operation. A newer attempt voids the peer's earlier grants and
// requests.
Executor::Early& Executor::early_for(const PeerId& from, const link::FrameHeader& header) {
  Early& early = early_[from].operations[header.key];
  if (header.attempt > early.attempt) {
    early.credit = 0;
    early.asks = false;
    early.attempt = header.attempt;
  }
  return early;
}

// Uses the frames that arrived before the operation was called here.
void Executor::use_early(RunningAttempt& attempt) {
  std::vector<std::pair<PeerId, Early>> all;
  for (auto& [peer, said] : early_) {
    const auto it = said.operations.find(attempt.spec.key);
    // Frames of a later attempt wait for that attempt.
    if (it == said.operations.end() || it->second.attempt > attempt.spec.attempt) continue;
    forget_frames(peer, it->second);
    all.emplace_back(peer, std::move(it->second));
    said.operations.erase(it);
  }
  for (const auto& [peer, early] : all) {
    if (early.credit == 0 || early.attempt < attempt.spec.attempt) continue;
    link::FrameHeader header = attempt.header(link::FrameType::ready);
    header.credit = early.credit;
    (void)control(peer, header, true);
  }
  for (auto& [peer, early] : all)
    for (EarlyFrame& frame : early.frames) use_early(attempt, peer, frame);
}

void Executor::use_early(RunningAttempt& attempt, const PeerId& from, EarlyFrame& frame) {
  const link::FrameHeader& header = frame.header;
  if (header.signature != attempt.spec.signature) {
    events_.disagreement = true;
    return;
  }
  if (header.attempt != attempt.spec.attempt || header.segment >= attempt.segments.size()) return;
  const Segment& segment = attempt.layout.segments[header.segment];
  if (header.final) {
    const auto rank = attempt.ranks.find(from);
    if (rank == attempt.ranks.end() || !attempt.results_first() ||
        attempt.schedule.chunks[segment.chunk].final_from != rank->second ||
        header.payload_bytes != segment.raw_bytes || attempt.segments[header.segment].arrived) {
      return;
    }
    attempt.traffic.rx_bytes += header.payload_bytes;
    hear(attempt, rank->second);
    return final_bytes(attempt, header.segment, std::move(frame.buffer));
  }
  const std::uint32_t source = attempt.source_index(header.segment, from);
  if (source == kNoSource) return;
  const Source& known = attempt.schedule.chunks[segment.chunk].sources[source];
  if (header.payload_bytes != attempt.received_bytes(header.segment, known))
    return;  // signatures agree, so only a dishonest peer gets here, and gains nothing
  attempt.traffic.rx_bytes += header.payload_bytes;
  hear(attempt, known.rank);
  contribution(attempt, header.segment, source, std::move(frame.buffer));
}

Status Executor::control(const PeerId& from, const link::FrameHeader& header, bool called) {
  if (header.type == link::FrameType::eager_return) {
    Port& port = ports_[from];
    port.eager_out -= std::min<std::uint64_t>(port.eager_out, header.credit);
    return {};
  }
  if (header.key.admission != admission_ || header.attempt < abort_floor_) {
    // The attempt is over, or its epoch has not reached this peer yet.
    if (header.attempt <= epoch_) return {};
  }
  RunningAttempt* attempt = find(header.key);
  if (attempt == nullptr || attempt->spec.attempt < header.attempt) {
    if (attempt == nullptr && header.attempt <= epoch_ && called) return {};
    if (!room_for_early(from, header.key))
      return Status(Code::refused, "grants for too many operations");
    Early& early = early_for(from, header);
    if (header.attempt < early.attempt) return {};  // a later attempt has replaced it
    if (header.type == link::FrameType::ready) {
      early.credit = plus(early.credit, header.credit);
    } else {
      early.asks = true;
    }
    return {};
  }
  if (attempt->spec.attempt != header.attempt) return {};
  if (attempt->spec.signature != header.signature) {
    events_.disagreement = true;
    return {};
  }
  if (header.type == link::FrameType::ask) {
    const auto rank = attempt->ranks.find(from);
    if (rank == attempt->ranks.end()) return Status(Code::refused, "a question from a stranger");
    if (ports_[from].control.size() >= kMaxWords)
      return Status(Code::refused, "more questions than answers were fetched");
    // It is small enough to fit: one grant for all of it.
    grant(*attempt, from, kUnlimited);
    return {};
  }
  const auto outlet = attempt->outlets.find(from);
  if (outlet == attempt->outlets.end()) return {};
  Outlet& out = outlet->second;
  out.credit = plus(out.credit, header.credit);
  queue_turn(from, *attempt, out);
  return {};
}

}  // namespace pccl::collective
