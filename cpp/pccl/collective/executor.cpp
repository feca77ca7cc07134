#include "pccl/collective/executor.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "pccl/base/copy.h"
#include "pccl/collective/codes.h"
#include "pccl/reduce/reduce.h"
#include "pccl/topology/plan.h"

namespace pccl::collective {
namespace {

constexpr std::uint32_t kLeastSegment = 64;              // bytes
constexpr std::size_t kCopyPart = std::size_t{2} << 20;  // of a result that is copied at once

}  // namespace

// -- sizes and look-ups

RunningAttempt* Executor::find(const wire::OpKey& key) {
  const auto it = attempts_.find(key);
  return it == attempts_.end() ? nullptr : it->second.get();
}

// -- starting and ending

Status Executor::start(OperationSpec spec) {
  auto owned = std::make_unique<RunningAttempt>();
  RunningAttempt& attempt = *owned;
  attempt.spec = std::move(spec);
  attempt.token = ++next_token_;
  const wire::OpKey key = attempt.spec.key;
  try {
    prepare(attempt);
  } catch (const std::bad_alloc&) {
    return Status(Code::internal_error, "no memory for the operation's results");
  }
  if (attempt.unheard == 0) events_.met.push_back(key);
  attempts_[key] = std::move(owned);

  // Offer the chunks that start at this rank: they need no contribution. (A member that is alone
  // has its whole result.)
  for (std::uint32_t i = 0; i < attempt.layout.segments.size(); ++i) {
    const ChunkFlow& flow = attempt.schedule.chunks[attempt.layout.segments[i].chunk];
    if (!flow.sources.empty()) continue;
    if (flow.owner()) {
      ready_.push_back({key, attempt.token, i, {}});
    } else if (flow.partial_to != kNobody) {
      offer(attempt, attempt.spec.world->members[flow.partial_to].id, i, false);
    }
  }
  post_receives(attempt);
  use_early(attempt);
  const bool empty = attempt.unfinished == 0;
  if (empty) events_.finished.push_back(key);
  combine();
  return {};
}

void Executor::prepare(RunningAttempt& attempt) {
  const OperationSpec& spec = attempt.spec;
  const wire::EpochRecord& world = *spec.world;
  const Kind kind = spec.what.kind;
  const bool parts = scatters(kind) || gathers(kind);
  // A root has nothing to receive, so it needs no scratch memory.
  const bool in_place =
      kind == Kind::all_reduce || (kind == Kind::broadcast && spec.rank != spec.what.root);
  std::uint64_t bytes = 0;
  std::size_t scratch_bytes = 0;
  bool widens = false;
  std::vector<ArrayShape> shapes;
  for (const ArrayRef& array : spec.arrays) {
    const std::size_t element = element_size(array.dtype);
    shapes.push_back({array.count, array.dtype});
    bytes += array.count * element * (parts ? world.members.size() : 1);
    widens = widens || (reduces(kind) && accumulation_size(array.dtype, spec.op) > element);
    if (in_place && array.send == array.recv)
      scratch_bytes += (array.count * element + 63) / 64 * 64;
  }
  if (scratch_bytes > 0) attempt.scratch = pool_->take(scratch_bytes);
  std::size_t used = 0;
  for (const ArrayRef& array : spec.arrays) {
    if (!in_place || array.send != array.recv) {
      attempt.out.push_back(static_cast<std::uint8_t*>(array.recv));
      continue;
    }
    attempt.out.push_back(attempt.scratch.data() + used);
    used += (array.count * element_size(array.dtype) + 63) / 64 * 64;
  }
  const wire::SizeClass& size =
      topology::size_class(world.plan, bytes, widens, static_cast<bool>(spec.quantization));
  attempt.schedule = make_schedule(world.plan, size, spec.rank, spec.what, bytes);
  attempt.layout =
      parts ? cut_parts(
                  shapes, spec.op, static_cast<std::uint32_t>(world.members.size()),
                  std::max(kLeastSegment, world.plan.segment_bytes / attempt.schedule.most_ranks))
            : cut(shapes, spec.op, attempt.schedule.shares, world.plan.segment_bytes);
  if (spec.quantization) {
    attempt.straight =
        size.kind != wire::ScheduleKind::ring && size.kind != wire::ScheduleKind::host_ring;
    attempt.regional = size.kind == wire::ScheduleKind::regional;
    prepare_codes(*pool_, attempt);
  }
  attempt.segments.resize(attempt.layout.segments.size());
  attempt.partials.resize(widens || scatters(kind) ? attempt.layout.segments.size() : 0);
  for (std::uint32_t rank = 0; rank < world.members.size(); ++rank) {
    attempt.ranks[world.members[rank].id] = rank;
  }
  attempt.awaited.resize(world.members.size());
  std::map<std::uint32_t, std::uint64_t> unasked;  // by rank: bytes that go there first
  for (std::size_t i = 0; i < attempt.segments.size(); ++i) {
    const Segment& segment = attempt.layout.segments[i];
    const ChunkFlow& flow = attempt.schedule.chunks[segment.chunk];
    if (i > 0 && attempt.layout.segments[i - 1].chunk == segment.chunk)
      attempt.segments[i].place = attempt.segments[i - 1].place + 1;
    if (!flow.sources.empty()) {
      const std::uint32_t place = attempt.segments[i].place;
      if (attempt.to_combine.size() <= place) attempt.to_combine.resize(place + 1);
      ++attempt.to_combine[place];
    }
    attempt.unfinished += flow.ends_here() ? 1 : 0;
    for (const Source& source : flow.sources) await(attempt, source.rank);
    if (flow.final_from != kNobody) await(attempt, flow.final_from);
    attempt.segments[i].missing = static_cast<std::uint32_t>(flow.sources.size());
    attempt.segments[i].seen.resize(flow.sources.size());
    if (flow.partial_to != kNobody)
      unasked[flow.partial_to] += attempt.contributed_bytes(static_cast<std::uint32_t>(i));
    if (attempt.results_first()) {
      for (const std::uint32_t to : flow.final_to) unasked[to] += segment.raw_bytes;
    }
  }
  for (const auto& [rank, amount] : unasked) {
    const PeerId& to = world.members[rank].id;
    Outlet& outlet = attempt.outlets[to];
    if (amount > options_.eager_bytes) continue;  // the receiver grants them when it has called
    Port& port = ports_[to];
    if (port.eager_out + amount <= options_.eager_room) {
      outlet.eager = true;
      outlet.eager_left = amount;
      port.eager_out += amount;
    } else {
      send_control(to, attempt.header(link::FrameType::ask));
    }
  }
}

void Executor::await(RunningAttempt& attempt, std::uint32_t rank) {
  if (attempt.awaited[rank]) return;
  attempt.awaited[rank] = true;
  ++attempt.unheard;
}

// A payload of that rank arrives.
void Executor::hear(RunningAttempt& attempt, std::uint32_t rank) {
  if (!attempt.awaited[rank]) return;
  attempt.awaited[rank] = false;
  if (--attempt.unheard == 0) events_.met.push_back(attempt.spec.key);
}

BytesMoved Executor::cancel(const wire::OpKey& key) {
  const auto it = attempts_.find(key);
  if (it == attempts_.end()) return {};
  RunningAttempt& attempt = *it->second;
  for (const auto& [peer, rank] : attempt.ranks) {
    if (rank == attempt.spec.rank) continue;
    const auto port = ports_.find(peer);
    std::uint64_t unsent = links_.release(peer, attempt.token);
    const auto outlet = attempt.outlets.find(peer);
    if (outlet != attempt.outlets.end()) unsent += outlet->second.eager_left;
    if (port == ports_.end()) continue;
    port->second.eager_out -= std::min(port->second.eager_out, unsent);
    std::erase(port->second.turn, key);
  }
  for (const auto& [peer, segments] : attempt.window) {
    const std::uint64_t bytes = std::uint64_t{segments} * attempt.spec.world->plan.segment_bytes;
    granted_bytes_ -= std::min(granted_bytes_, bytes);
  }
  const BytesMoved moved = attempt.traffic;
  attempts_.erase(it);
  return moved;
}

BytesMoved Executor::commit(const wire::OpKey& key) {
  const auto it = attempts_.find(key);
  if (it == attempts_.end()) return {};
  const RunningAttempt& attempt = *it->second;
  for (std::size_t i = 0; i < attempt.spec.arrays.size(); ++i) {
    const ArrayRef& array = attempt.spec.arrays[i];
    if (attempt.out[i] == array.recv || array.count == 0) continue;
    const std::size_t bytes = array.count * element_size(array.dtype);
    auto* const to = static_cast<std::uint8_t*>(array.recv);
    if (bytes < kPastCacheFrom) {
      copy(to, attempt.out[i], bytes);
      continue;
    }
    parallel_.run((bytes + kCopyPart - 1) / kCopyPart, [&](std::size_t part) {
      const std::size_t at = part * kCopyPart;
      copy_past_cache(to + at, attempt.out[i] + at, std::min(kCopyPart, bytes - at));
    });
  }
  for (std::size_t i = 0; i < attempt.residuals.size(); ++i) {
    const Buffer& residual = attempt.residuals[i];
    if (residual) copy(attempt.spec.arrays[i].residual, residual.data(), residual.size());
  }
  return cancel(key);
}

void Executor::set_epoch(std::uint64_t epoch, std::uint64_t abort_floor, std::uint64_t admission) {
  epoch_ = epoch;
  abort_floor_ = abort_floor;
  admission_ = admission;
  for (auto& [peer, said] : early_) {
    std::erase_if(said.operations, [&, from = peer](const auto& item) {
      // Grants for a later admission, which may be two epochs ahead, are kept.
      const bool stale = item.first.admission < admission || item.second.attempt < abort_floor;
      if (stale) forget_frames(from, item.second);
      return stale;
    });
  }
}

void Executor::reset_link(const PeerId& peer) {
  ports_.erase(peer);
  early_.erase(peer);
  for (auto& [key, attempt] : attempts_) {
    const auto outlet = attempt->outlets.find(peer);
    if (outlet == attempt->outlets.end()) continue;
    outlet->second.queued = false;
    outlet->second.eager_left = 0;  // the reservation was erased with the port
  }
}

// -- combining

void Executor::combine() {
  // Passing on may make more ready: a member alone has every contribution.
  while (!ready_.empty()) {
    std::vector<Ready> ready = std::exchange(ready_, {});
    // An operation may have ended meanwhile.
    std::erase_if(ready, [&](const Ready& each) {
      const RunningAttempt* attempt = find(each.key);
      return attempt == nullptr || attempt->token != each.token;
    });
    std::size_t bytes = 0;
    for (const Ready& each : ready) {
      const RunningAttempt& attempt = *find(each.key);
      const bool in_place = attempt.segments[each.segment].arrived && !each.final;
      bytes += in_place ? 0 : attempt.layout.segments[each.segment].raw_bytes;
    }
    const auto work = [&](std::size_t i) {
      RunningAttempt& attempt = *find(ready[i].key);
      if (attempt.segments[ready[i].segment].arrived) {
        place_final(attempt, ready[i].segment, ready[i].final);
      } else {
        combine(attempt, ready[i].segment);
      }
    };
    if (bytes < kWorthSharing) {
      for (std::size_t i = 0; i < ready.size(); ++i) work(i);
    } else {
      parallel_.run(ready.size(), work);
    }
    for (Ready& each : ready) pass_on(*find(each.key), each);
  }
}

// Combines the contributions to a segment with this rank's elements. REQUIRES: all are here.
void Executor::combine(RunningAttempt& attempt, std::uint32_t index) {
  const Segment& segment = attempt.layout.segments[index];
  SegmentState& state = attempt.segments[index];
  const ChunkFlow& flow = attempt.schedule.chunks[segment.chunk];
  const OperationSpec& spec = attempt.spec;
  const unsigned divisor = flow.owner() ? static_cast<unsigned>(spec.world->members.size()) : 0;
  std::sort(
      state.held.begin(), state.held.end(),
      [](const HeldContribution& a, const HeldContribution& b) { return a.source < b.source; });
  if (spec.what.kind == Kind::all_to_all) return append(attempt, index);
  if (spec.quantization && flow.owner()) return combine_coded(*pool_, attempt, index);
  // By contribution: whether it is combined in the accumulation type. Codes are decoded to it.
  std::vector<bool> is_wide;
  for (HeldContribution& held : state.held) {
    const Source& source = flow.sources[held.source];
    const bool codes = attempt.is_coded(segment.chunk, source.rank, spec.rank);
    if (codes)
      held.buffer = decode_contribution(*pool_, attempt, index, held.buffer, source.accumulated);
    is_wide.push_back(codes || source.accumulated);
  }
  const bool kept_apart = !flow.owner() && attempt.apart(segment);
  if (kept_apart) attempt.partials[index] = pool_->take(segment.accumulated_bytes);
  std::size_t raw_at = 0;
  std::size_t wide_at = 0;
  std::vector<reduce::Contribution> contributions(state.held.size());
  for (const Piece& piece : attempt.layout.pieces_of(segment)) {
    const ArrayRef& array = spec.arrays[piece.array];
    const std::size_t element = element_size(array.dtype);
    const std::size_t wide = accumulation_size(array.dtype, spec.op);
    for (std::size_t i = 0; i < contributions.size(); ++i) {
      contributions[i] = {state.held[i].buffer.data() + (is_wide[i] ? wide_at : raw_at),
                          is_wide[i]};
    }
    const std::uint8_t* own = attempt.own_at(segment.chunk, piece);
    std::uint8_t* to = kept_apart ? attempt.partials[index].data() + wide_at
                                  : attempt.result_at(segment.chunk, piece);
    // A root's result memory may be its input.
    if (to != own || !contributions.empty())
      reduce::reduce(array.dtype, spec.op, own, contributions, divisor, to, piece.count);
    raw_at += piece.count * element;
    wide_at += piece.count * wide;
  }
}

// The same for an all-to-all: appends the contributions to this rank's elements or, for the owner,
// puts them into the parts of the result.
void Executor::append(RunningAttempt& attempt, std::uint32_t index) {
  const Segment& segment = attempt.layout.segments[index];
  const ChunkFlow& flow = attempt.schedule.chunks[segment.chunk];
  const std::uint32_t rank = attempt.spec.rank;
  const auto each_piece = [&](const auto& use) {
    std::size_t at = 0;
    for (const Piece& piece : attempt.layout.pieces_of(segment)) {
      const std::size_t bytes = piece.count * element_size(attempt.spec.arrays[piece.array].dtype);
      use(piece, at, bytes);
      at += bytes;
    }
  };
  if (!flow.owner()) {
    Buffer& partial = attempt.partials[index] = pool_->take(attempt.contributed_bytes(index));
    each_piece([&](const Piece& piece, std::size_t at, std::size_t bytes) {
      copy(partial.data() + at, attempt.own_at(segment.chunk, piece), bytes);
    });
    std::size_t end = segment.raw_bytes;
    for (const HeldContribution& held : attempt.segments[index].held) {
      const std::size_t bytes = attempt.received_bytes(index, flow.sources[held.source]);
      copy(partial.data() + end, held.buffer.data(), bytes);
      end += bytes;
    }
    return;
  }
  each_piece([&](const Piece& piece, std::size_t, std::size_t bytes) {
    copy(attempt.result_at(rank, piece), attempt.own_at(segment.chunk, piece), bytes);
  });
  for (const HeldContribution& held : attempt.segments[index].held) {
    if (!held.buffer) continue;  // it was received in its place
    std::size_t from = 0;
    for (const std::uint32_t other : flow.sources[held.source].ranks) {
      each_piece([&](const Piece& piece, std::size_t at, std::size_t bytes) {
        copy(attempt.result_at(other, piece), held.buffer.data() + from + at, bytes);
      });
      from += segment.raw_bytes;
    }
  }
}

// Follows combine() and place_final(): others get the segment, or send the next one.
void Executor::pass_on(RunningAttempt& attempt, Ready& ready) {
  const std::uint32_t index = ready.segment;
  SegmentState& state = attempt.segments[index];
  const ChunkFlow& flow = attempt.schedule.chunks[attempt.layout.segments[index].chunk];
  const std::vector<wire::Member>& members = attempt.spec.world->members;
  if (state.arrived) {
    if (attempt.spec.quantization && !flow.final_to.empty())
      attempt.results[index] = std::move(ready.final);
    segment_final(attempt, index);
  } else {
    state.held.clear();
    state.missing = 0;
    if (flow.owner()) {
      segment_final(attempt, index);
    } else {
      offer(attempt, members[flow.partial_to].id, index, false);
    }
    if (!flow.sources.empty()) combined(attempt, index);
    // The contributions' memory is free again: their senders may send the next ones.
    for (const Source& from : flow.sources) {
      const PeerId& peer = members[from.rank].id;
      if (attempt.window.contains(peer)) grant(attempt, peer, 1);
    }
  }
  if (attempt.unfinished == 0) events_.finished.push_back(ready.key);
}

// Copies the final bytes of a segment to the memory of its pieces.
void Executor::scatter(RunningAttempt& attempt, std::uint32_t index, const Buffer& from) {
  const Segment& segment = attempt.layout.segments[index];
  std::size_t at = 0;
  for (const Piece& piece : attempt.layout.pieces_of(segment)) {
    const std::size_t element = element_size(attempt.spec.arrays[piece.array].dtype);
    std::memcpy(attempt.result_at(segment.chunk, piece), from.data() + at, piece.count * element);
    at += piece.count * element;
  }
}

// A segment's final bytes have arrived, in `from` or, if that is empty, in their result memory.
void Executor::final_bytes(RunningAttempt& attempt, std::uint32_t index, Buffer from) {
  // A second copy may arrive on another stripe. Keep the first: frames may be reading it.
  SegmentState& state = attempt.segments[index];
  if (state.arrived) return;
  state.arrived = true;
  ready_.push_back({attempt.spec.key, attempt.token, index, std::move(from)});
}

void Executor::place_final(RunningAttempt& attempt, std::uint32_t index, const Buffer& from) {
  if (attempt.spec.quantization) {
    decode_result(attempt, index, from);
  } else if (from) {
    scatter(attempt, index, from);
  }
}

void Executor::segment_final(RunningAttempt& attempt, std::uint32_t index) {
  SegmentState& state = attempt.segments[index];
  if (state.finished) return;
  state.finished = true;
  --attempt.unfinished;
  const ChunkFlow& flow = attempt.schedule.chunks[attempt.layout.segments[index].chunk];
  for (const std::uint32_t rank : flow.final_to) {
    offer(attempt, attempt.spec.world->members[rank].id, index, true);
  }
}

void Executor::contribution(RunningAttempt& attempt, std::uint32_t index, std::uint32_t source,
                            Buffer buffer) {
  SegmentState& state = attempt.segments[index];
  if (state.seen[source]) return;
  state.seen[source] = true;
  state.held.push_back({source, std::move(buffer)});
  if (state.missing > 1) {
    --state.missing;
  } else {
    ready_.push_back({attempt.spec.key, attempt.token, index, {}});
  }
}

// -- granting and sending

// Grants contributions to this rank. Those of few bytes come without a grant, unless their sender
// has asked for one.
void Executor::post_receives(RunningAttempt& attempt) {
  std::set<std::uint32_t> contributors;
  // By rank: whether its contributions wait here for others, so that a window bounds their memory.
  std::map<std::uint32_t, bool> staged;
  // Partial results between hosts have no window: with one, members could wait for each other's
  // room in a circle. All members work through the chunks side by side. So none gets further ahead
  // than its neighbours' windows allow or, if it has no neighbours, than ChunkFlow::paced allows.
  for (const Segment& segment : attempt.layout.segments) {
    const ChunkFlow& flow = attempt.schedule.chunks[segment.chunk];
    for (const Source& source : flow.sources) {
      contributors.insert(source.rank);
      staged[source.rank] = staged[source.rank] || (flow.sources.size() > 1 && source.windowed &&
                                                    !attempt.in_result(segment, source));
    }
    if (attempt.results_first() && flow.final_from != kNobody) contributors.insert(flow.final_from);
  }
  const auto asks = [&](const PeerId& peer) {
    const auto said = early_.find(peer);
    if (said == early_.end()) return false;
    const auto early = said->second.operations.find(attempt.spec.key);
    return early != said->second.operations.end() && early->second.asks;
  };
  for (const std::uint32_t rank : contributors) {
    const PeerId& peer = attempt.spec.world->members[rank].id;
    const bool asked = asks(peer);
    if (attempt.unasked_bytes_from(rank) <= options_.eager_bytes && !asked) continue;
    if (!staged[rank]) {
      grant(attempt, peer, kUnlimited);
      continue;
    }
    const std::uint64_t segment_bytes = attempt.spec.world->plan.segment_bytes;
    const std::uint64_t left =
        options_.buffer_bytes > granted_bytes_ ? options_.buffer_bytes - granted_bytes_ : 0;
    const std::uint64_t fits = left / 4 / segment_bytes / contributors.size();
    const auto window =
        static_cast<std::uint32_t>(std::clamp<std::uint64_t>(fits, 1, max_window(segment_bytes)));
    attempt.window[peer] = window;
    attempt.granted[peer] = 0;
    granted_bytes_ += window * segment_bytes;
    grant(attempt, peer, window);
  }
}

void Executor::grant(RunningAttempt& attempt, const PeerId& to, std::uint32_t credit) {
  const auto granted = attempt.granted.find(to);
  if (credit == kUnlimited) {
    attempt.granted.erase(to);
  } else if (granted != attempt.granted.end()) {
    granted->second = plus(granted->second, credit);
  }
  link::FrameHeader header = attempt.header(link::FrameType::ready);
  header.credit = credit;
  send_control(to, header);
}

void Executor::send_control(const PeerId& to, const link::FrameHeader& header) {
  ports_[to].control.push_back(header);
  links_.wake(to);
}

void Executor::offer(RunningAttempt& attempt, const PeerId& to, std::uint32_t segment, bool final) {
  Outlet& outlet = attempt.outlets[to];
  if (final) {
    outlet.finals.push_back(segment);
  } else {
    outlet.partials.emplace(attempt.segments[segment].place, segment);
  }
  queue_turn(to, attempt, outlet);
}

// Counts a segment as combined. Segments of later places may become sendable.
void Executor::combined(RunningAttempt& attempt, std::uint32_t segment) {
  const std::uint32_t before = attempt.combining;
  --attempt.to_combine[attempt.segments[segment].place];
  while (attempt.combining < attempt.to_combine.size() &&
         attempt.to_combine[attempt.combining] == 0) {
    ++attempt.combining;
  }
  if (attempt.combining == before) return;
  for (auto& [peer, outlet] : attempt.outlets) queue_turn(peer, attempt, outlet);
}

void Executor::queue_turn(const PeerId& to, RunningAttempt& attempt, Outlet& outlet) {
  if (!attempt.sendable(outlet)) return;
  if (!outlet.queued) {
    outlet.queued = true;
    ports_[to].turn.push_back(attempt.spec.key);
  }
  links_.wake(to);
}

bool Executor::next(const PeerId& to, link::OutgoingFrame& frame) {
  const auto found = ports_.find(to);
  if (found == ports_.end()) return false;
  Port& port = found->second;
  if (!port.control.empty()) {
    frame = link::make_frame(port.control.front());
    port.control.pop_front();
    return true;
  }
  if (port.eager_used >= options_.eager_room / 4) {
    const auto returned = static_cast<std::uint32_t>(std::exchange(port.eager_used, 0));
    frame = link::make_frame({.type = link::FrameType::eager_return, .credit = returned});
    return true;
  }
  while (!port.turn.empty()) {
    const wire::OpKey key = port.turn.front();
    port.turn.pop_front();
    RunningAttempt* attempt = find(key);
    if (attempt == nullptr) continue;
    Outlet& outlet = attempt->outlets[to];
    outlet.queued = false;
    if (!attempt->sendable(outlet)) continue;
    const bool final = !outlet.finals.empty();
    const std::uint32_t index = final ? outlet.finals.front() : outlet.partials.begin()->second;
    if (final) {
      outlet.finals.pop_front();
    } else {
      outlet.partials.erase(outlet.partials.begin());
    }
    const Segment& segment = attempt->layout.segments[index];
    const ChunkFlow& flow = attempt->schedule.chunks[segment.chunk];
    const bool accumulated = !final && !flow.sources.empty();
    link::FrameHeader header = attempt->header(link::FrameType::data);
    header.final = final;
    header.segment = index;
    header.payload_bytes = final ? attempt->result_bytes(index) : attempt->contributed_bytes(index);
    const bool unasked = !final || attempt->results_first();
    if (unasked && outlet.eager) {
      header.eager = true;
      frame.eager_bytes = header.payload_bytes;
      outlet.eager_left -= std::min<std::uint64_t>(outlet.eager_left, header.payload_bytes);
    } else if (unasked && outlet.credit != kUnlimited) {
      --outlet.credit;
    }
    frame.payload.clear();
    if (final && attempt->spec.quantization) {
      frame.payload.push_back(link::vec(attempt->results[index].data(), header.payload_bytes));
    } else if (!final && attempt->is_coded(segment.chunk, attempt->spec.rank, flow.partial_to)) {
      frame.packed = encode_contribution(*pool_, *attempt, index, accumulated);
      frame.payload.push_back(link::vec(frame.packed.data(), header.payload_bytes));
    } else if (accumulated && attempt->apart(segment)) {
      frame.packed = std::move(attempt->partials[index]);  // it is sent once
      frame.payload.push_back(link::vec(frame.packed.data(), header.payload_bytes));
    } else {
      for (const Piece& piece : attempt->layout.pieces_of(segment)) {
        const ArrayRef& array = attempt->spec.arrays[piece.array];
        const std::size_t element = element_size(array.dtype);
        // A raw contribution is this rank's elements. All other bytes are in result memory.
        const std::uint8_t* from = final || accumulated ? attempt->result_at(segment.chunk, piece)
                                                        : attempt->own_at(segment.chunk, piece);
        frame.payload.push_back(link::vec(from, piece.count * element));
      }
      if (segment.piece_count > kMaxPieces) {
        frame.packed = pool_->take(header.payload_bytes);
        std::size_t at = 0;
        for (const iovec& part : frame.payload) {
          std::memcpy(frame.packed.data() + at, part.iov_base, part.iov_len);
          at += part.iov_len;
        }
        frame.payload = {link::vec(frame.packed.data(), at)};
      }
    }
    frame.checksum_due = links_.is_checked(to);
    frame.header = link::encode(header);
    frame.payload_bytes = header.payload_bytes;
    frame.token = attempt->token;
    frame.trailer = true;
    attempt->traffic.tx_bytes += header.payload_bytes;
    const std::uint32_t plain = accumulated ? segment.accumulated_bytes : segment.raw_bytes;
    attempt->traffic.saved_bytes += plain - std::min(plain, header.payload_bytes);
    if (attempt->sendable(outlet)) {
      outlet.queued = true;
      port.turn.push_back(key);
    }
    return true;
  }
  return false;
}

}  // namespace pccl::collective
