#include "pccl/collective/executor.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "pccl/base/copy.h"
#include "pccl/reduce/reduce.h"
#include "pccl/topology/plan.h"

namespace pccl::collective {
namespace {

constexpr std::uint32_t kLeastSegment = 64;              // bytes
constexpr std::size_t kCopyPart = std::size_t{2} << 20;  // of a result that is copied at once

// The most segments in a window, and how many a rank may be ahead of what it combines: at least as
// many bytes as are on the way on a long and fast link.
std::uint32_t max_window(std::uint64_t segment_bytes) {
  constexpr std::uint64_t kBytes = 32 << 20;
  return static_cast<std::uint32_t>(std::max<std::uint64_t>(64, kBytes / segment_bytes));
}

}  // namespace

// -- sizes and look-ups

Executor::Operation* Executor::find(const wire::OpKey& key) {
  const auto it = operations_.find(key);
  return it == operations_.end() ? nullptr : it->second.get();
}

std::uint32_t Executor::contribution_bytes(const Operation& operation, std::uint32_t segment,
                                           std::uint32_t from, std::uint32_t to, bool accumulated) {
  const Segment& cut = operation.layout.segments[segment];
  if (coded(operation, cut.chunk, from, to)) {
    const CodedBytes& bytes = operation.coded[segment];
    return accumulated ? bytes.accumulated : bytes.raw;
  }
  return accumulated ? cut.accumulated_bytes : cut.raw_bytes;
}

std::uint32_t Executor::received_bytes(const Operation& operation, std::uint32_t segment,
                                       const Source& source) {
  if (operation.spec.what.kind == Kind::all_to_all)
    return operation.layout.segments[segment].raw_bytes *
           static_cast<std::uint32_t>(source.ranks.size());
  return contribution_bytes(operation, segment, source.rank, operation.spec.rank,
                            source.accumulated);
}

std::uint32_t Executor::contributed_bytes(const Operation& operation, std::uint32_t segment) {
  const Segment& cut = operation.layout.segments[segment];
  const ChunkFlow& flow = operation.schedule.chunks[cut.chunk];
  if (operation.spec.what.kind != Kind::all_to_all)
    return contribution_bytes(operation, segment, operation.spec.rank, flow.partial_to,
                              !flow.sources.empty());
  std::size_t ranks = 1;
  for (const Source& source : flow.sources) ranks += source.ranks.size();
  return cut.raw_bytes * static_cast<std::uint32_t>(ranks);
}

std::uint32_t Executor::result_bytes(const Operation& operation, std::uint32_t segment) {
  return operation.spec.quantization ? operation.coded[segment].result
                                     : operation.layout.segments[segment].raw_bytes;
}

std::uint32_t Executor::source_index(const Operation& operation, std::uint32_t segment,
                                     const PeerId& from) const {
  const auto rank = operation.ranks.find(from);
  if (rank == operation.ranks.end()) return kNoSource;
  const auto& sources = operation.schedule.chunks[operation.layout.segments[segment].chunk].sources;
  for (std::uint32_t i = 0; i < sources.size(); ++i) {
    if (sources[i].rank == rank->second) return i;
  }
  return kNoSource;
}

// The bytes that `rank` may have to send before it knows that this member has called.
std::uint64_t Executor::unasked_bytes_from(const Operation& operation, std::uint32_t rank) const {
  std::uint64_t bytes = 0;
  for (std::uint32_t index = 0; index < operation.layout.segments.size(); ++index) {
    const Segment& segment = operation.layout.segments[index];
    const ChunkFlow& flow = operation.schedule.chunks[segment.chunk];
    for (const Source& source : flow.sources) {
      if (source.rank == rank) bytes += received_bytes(operation, index, source);
    }
    if (results_first(operation) && flow.final_from == rank) bytes += segment.raw_bytes;
  }
  return bytes;
}

const std::uint8_t* Executor::own_at(const Operation& operation, std::uint32_t chunk,
                                     const Piece& piece) {
  const ArrayRef& array = operation.spec.arrays[piece.array];
  const bool parts = scatters(operation.spec.what.kind);
  const std::uint64_t first = piece.first + (parts ? chunk * array.count : 0);
  return static_cast<const std::uint8_t*>(array.send) + first * element_size(array.dtype);
}

std::uint8_t* Executor::result_at(const Operation& operation, std::uint32_t from,
                                  const Piece& piece) {
  const ArrayRef& array = operation.spec.arrays[piece.array];
  const bool parts = gathers(operation.spec.what.kind);
  const std::uint64_t first = piece.first + (parts ? from * array.count : 0);
  return operation.out[piece.array] + first * element_size(array.dtype);
}

bool Executor::apart(const Operation& operation, const Segment& segment) {
  return scatters(operation.spec.what.kind) || segment.accumulated_bytes != segment.raw_bytes;
}

link::FrameHeader Executor::header_for(const Operation& operation, link::FrameType type) const {
  return {.type = type,
          .signature = operation.spec.signature,
          .key = operation.spec.key,
          .attempt = operation.spec.attempt};
}

// -- starting and ending

Status Executor::start(OperationSpec spec) {
  auto owned = std::make_unique<Operation>();
  Operation& operation = *owned;
  operation.spec = std::move(spec);
  operation.token = ++next_token_;
  const wire::OpKey key = operation.spec.key;
  try {
    prepare(operation);
  } catch (const std::bad_alloc&) {
    return Status(Code::internal_error, "no memory for the operation's results");
  }
  if (operation.unheard == 0) events_.met.push_back(key);
  operations_[key] = std::move(owned);

  // Offer the chunks that start at this rank: they need no contribution. (A member that is alone
  // has its whole result.)
  for (std::uint32_t i = 0; i < operation.layout.segments.size(); ++i) {
    const ChunkFlow& flow = operation.schedule.chunks[operation.layout.segments[i].chunk];
    if (!flow.sources.empty()) continue;
    if (flow.owner()) {
      ready_.push_back({key, operation.token, i, {}});
    } else if (flow.partial_to != kNobody) {
      offer(operation, operation.spec.world->members[flow.partial_to].id, i, false);
    }
  }
  post_receives(operation);
  use_early(operation);
  const bool empty = operation.unfinished == 0;
  if (empty) events_.finished.push_back(key);
  combine();
  return {};
}

void Executor::prepare(Operation& operation) {
  const OperationSpec& spec = operation.spec;
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
  if (scratch_bytes > 0) operation.scratch = pool_->take(scratch_bytes);
  std::size_t used = 0;
  for (const ArrayRef& array : spec.arrays) {
    if (!in_place || array.send != array.recv) {
      operation.out.push_back(static_cast<std::uint8_t*>(array.recv));
      continue;
    }
    operation.out.push_back(operation.scratch.data() + used);
    used += (array.count * element_size(array.dtype) + 63) / 64 * 64;
  }
  const wire::SizeClass& size =
      topology::size_class(world.plan, bytes, widens, static_cast<bool>(spec.quantization));
  operation.schedule = make_schedule(world.plan, size, spec.rank, spec.what, bytes);
  operation.layout =
      parts ? cut_parts(
                  shapes, spec.op, static_cast<std::uint32_t>(world.members.size()),
                  std::max(kLeastSegment, world.plan.segment_bytes / operation.schedule.most_ranks))
            : cut(shapes, spec.op, operation.schedule.shares, world.plan.segment_bytes);
  if (spec.quantization) {
    operation.straight =
        size.kind != wire::ScheduleKind::ring && size.kind != wire::ScheduleKind::host_ring;
    operation.regional = size.kind == wire::ScheduleKind::regional;
    prepare_codes(operation);
  }
  operation.segments.resize(operation.layout.segments.size());
  operation.partials.resize(widens || scatters(kind) ? operation.layout.segments.size() : 0);
  for (std::uint32_t rank = 0; rank < world.members.size(); ++rank) {
    operation.ranks[world.members[rank].id] = rank;
  }
  operation.awaited.resize(world.members.size());
  std::map<std::uint32_t, std::uint64_t> unasked;  // by rank: bytes that go there first
  for (std::size_t i = 0; i < operation.segments.size(); ++i) {
    const Segment& segment = operation.layout.segments[i];
    const ChunkFlow& flow = operation.schedule.chunks[segment.chunk];
    if (i > 0 && operation.layout.segments[i - 1].chunk == segment.chunk)
      operation.segments[i].place = operation.segments[i - 1].place + 1;
    if (!flow.sources.empty()) {
      const std::uint32_t place = operation.segments[i].place;
      if (operation.to_combine.size() <= place) operation.to_combine.resize(place + 1);
      ++operation.to_combine[place];
    }
    operation.unfinished += flow.ends_here() ? 1 : 0;
    for (const Source& source : flow.sources) await(operation, source.rank);
    if (flow.final_from != kNobody) await(operation, flow.final_from);
    operation.segments[i].missing = static_cast<std::uint32_t>(flow.sources.size());
    operation.segments[i].seen.resize(flow.sources.size());
    if (flow.partial_to != kNobody)
      unasked[flow.partial_to] += contributed_bytes(operation, static_cast<std::uint32_t>(i));
    if (results_first(operation)) {
      for (const std::uint32_t to : flow.final_to) unasked[to] += segment.raw_bytes;
    }
  }
  for (const auto& [rank, amount] : unasked) {
    const PeerId& to = world.members[rank].id;
    Outlet& outlet = operation.outlets[to];
    if (amount > options_.eager_bytes) continue;  // the receiver grants them when it has called
    Port& port = ports_[to];
    if (port.eager_out + amount <= options_.eager_room) {
      outlet.eager = true;
      outlet.eager_left = amount;
      port.eager_out += amount;
    } else {
      send_control(to, header_for(operation, link::FrameType::ask));
    }
  }
}

void Executor::await(Operation& operation, std::uint32_t rank) {
  if (operation.awaited[rank]) return;
  operation.awaited[rank] = true;
  ++operation.unheard;
}

// A payload of that rank arrives.
void Executor::hear(Operation& operation, std::uint32_t rank) {
  if (!operation.awaited[rank]) return;
  operation.awaited[rank] = false;
  if (--operation.unheard == 0) events_.met.push_back(operation.spec.key);
}

BytesMoved Executor::cancel(const wire::OpKey& key) {
  const auto it = operations_.find(key);
  if (it == operations_.end()) return {};
  Operation& operation = *it->second;
  for (const auto& [peer, rank] : operation.ranks) {
    if (rank == operation.spec.rank) continue;
    const auto port = ports_.find(peer);
    std::uint64_t unsent = links_.release(peer, operation.token);
    const auto outlet = operation.outlets.find(peer);
    if (outlet != operation.outlets.end()) unsent += outlet->second.eager_left;
    if (port == ports_.end()) continue;
    port->second.eager_out -= std::min(port->second.eager_out, unsent);
    std::erase(port->second.turn, key);
  }
  for (const auto& [peer, segments] : operation.window) {
    const std::uint64_t bytes = std::uint64_t{segments} * operation.spec.world->plan.segment_bytes;
    granted_bytes_ -= std::min(granted_bytes_, bytes);
  }
  const BytesMoved moved = operation.traffic;
  operations_.erase(it);
  return moved;
}

BytesMoved Executor::commit(const wire::OpKey& key) {
  const auto it = operations_.find(key);
  if (it == operations_.end()) return {};
  const Operation& operation = *it->second;
  for (std::size_t i = 0; i < operation.spec.arrays.size(); ++i) {
    const ArrayRef& array = operation.spec.arrays[i];
    if (operation.out[i] == array.recv || array.count == 0) continue;
    const std::size_t bytes = array.count * element_size(array.dtype);
    auto* const to = static_cast<std::uint8_t*>(array.recv);
    if (bytes < kPastCacheFrom) {
      copy(to, operation.out[i], bytes);
      continue;
    }
    parallel_.run((bytes + kCopyPart - 1) / kCopyPart, [&](std::size_t part) {
      const std::size_t at = part * kCopyPart;
      copy_past_cache(to + at, operation.out[i] + at, std::min(kCopyPart, bytes - at));
    });
  }
  for (std::size_t i = 0; i < operation.residuals.size(); ++i) {
    const Buffer& residual = operation.residuals[i];
    if (residual) copy(operation.spec.arrays[i].residual, residual.data(), residual.size());
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
  for (auto& [key, operation] : operations_) {
    const auto outlet = operation->outlets.find(peer);
    if (outlet == operation->outlets.end()) continue;
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
      const Operation* operation = find(each.key);
      return operation == nullptr || operation->token != each.token;
    });
    std::size_t bytes = 0;
    for (const Ready& each : ready) {
      const Operation& operation = *find(each.key);
      const bool in_place = operation.segments[each.segment].arrived && !each.final;
      bytes += in_place ? 0 : operation.layout.segments[each.segment].raw_bytes;
    }
    const auto work = [&](std::size_t i) {
      Operation& operation = *find(ready[i].key);
      if (operation.segments[ready[i].segment].arrived) {
        place_final(operation, ready[i].segment, ready[i].final);
      } else {
        combine(operation, ready[i].segment);
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
void Executor::combine(Operation& operation, std::uint32_t index) {
  const Segment& segment = operation.layout.segments[index];
  SegmentState& state = operation.segments[index];
  const ChunkFlow& flow = operation.schedule.chunks[segment.chunk];
  const OperationSpec& spec = operation.spec;
  const unsigned divisor = flow.owner() ? static_cast<unsigned>(spec.world->members.size()) : 0;
  std::sort(state.held.begin(), state.held.end(),
            [](const Held& a, const Held& b) { return a.source < b.source; });
  if (spec.what.kind == Kind::all_to_all) return append(operation, index);
  if (spec.quantization && flow.owner()) return combine_coded(operation, index);
  // By contribution: whether it is combined in the accumulation type. Codes are decoded to it.
  std::vector<bool> is_wide;
  for (Held& held : state.held) {
    const Source& source = flow.sources[held.source];
    const bool codes = coded(operation, segment.chunk, source.rank, spec.rank);
    if (codes) held.buffer = decode_contribution(operation, index, held.buffer, source.accumulated);
    is_wide.push_back(codes || source.accumulated);
  }
  const bool kept_apart = !flow.owner() && apart(operation, segment);
  if (kept_apart) operation.partials[index] = pool_->take(segment.accumulated_bytes);
  std::size_t raw_at = 0;
  std::size_t wide_at = 0;
  std::vector<reduce::Contribution> contributions(state.held.size());
  for (const Piece& piece : operation.layout.pieces_of(segment)) {
    const ArrayRef& array = spec.arrays[piece.array];
    const std::size_t element = element_size(array.dtype);
    const std::size_t wide = accumulation_size(array.dtype, spec.op);
    for (std::size_t i = 0; i < contributions.size(); ++i) {
      contributions[i] = {state.held[i].buffer.data() + (is_wide[i] ? wide_at : raw_at),
                          is_wide[i]};
    }
    const std::uint8_t* own = own_at(operation, segment.chunk, piece);
    std::uint8_t* to = kept_apart ? operation.partials[index].data() + wide_at
                                  : result_at(operation, segment.chunk, piece);
    // A root's result memory may be its input.
    if (to != own || !contributions.empty())
      reduce::reduce(array.dtype, spec.op, own, contributions, divisor, to, piece.count);
    raw_at += piece.count * element;
    wide_at += piece.count * wide;
  }
}

// The same for an all-to-all: appends the contributions to this rank's elements or, for the owner,
// puts them into the parts of the result.
void Executor::append(Operation& operation, std::uint32_t index) {
  const Segment& segment = operation.layout.segments[index];
  const ChunkFlow& flow = operation.schedule.chunks[segment.chunk];
  const std::uint32_t rank = operation.spec.rank;
  const auto each_piece = [&](const auto& use) {
    std::size_t at = 0;
    for (const Piece& piece : operation.layout.pieces_of(segment)) {
      const std::size_t bytes =
          piece.count * element_size(operation.spec.arrays[piece.array].dtype);
      use(piece, at, bytes);
      at += bytes;
    }
  };
  if (!flow.owner()) {
    Buffer& partial = operation.partials[index] = pool_->take(contributed_bytes(operation, index));
    each_piece([&](const Piece& piece, std::size_t at, std::size_t bytes) {
      copy(partial.data() + at, own_at(operation, segment.chunk, piece), bytes);
    });
    std::size_t end = segment.raw_bytes;
    for (const Held& held : operation.segments[index].held) {
      const std::size_t bytes = received_bytes(operation, index, flow.sources[held.source]);
      copy(partial.data() + end, held.buffer.data(), bytes);
      end += bytes;
    }
    return;
  }
  each_piece([&](const Piece& piece, std::size_t, std::size_t bytes) {
    copy(result_at(operation, rank, piece), own_at(operation, segment.chunk, piece), bytes);
  });
  for (const Held& held : operation.segments[index].held) {
    if (!held.buffer) continue;  // it was received in its place
    std::size_t from = 0;
    for (const std::uint32_t other : flow.sources[held.source].ranks) {
      each_piece([&](const Piece& piece, std::size_t at, std::size_t bytes) {
        copy(result_at(operation, other, piece), held.buffer.data() + from + at, bytes);
      });
      from += segment.raw_bytes;
    }
  }
}

// Follows combine() and place_final(): others get the segment, or send the next one.
void Executor::pass_on(Operation& operation, Ready& ready) {
  const std::uint32_t index = ready.segment;
  SegmentState& state = operation.segments[index];
  const ChunkFlow& flow = operation.schedule.chunks[operation.layout.segments[index].chunk];
  const std::vector<wire::Member>& members = operation.spec.world->members;
  if (state.arrived) {
    if (operation.spec.quantization && !flow.final_to.empty())
      operation.results[index] = std::move(ready.final);
    segment_final(operation, index);
  } else {
    state.held.clear();
    state.missing = 0;
    if (flow.owner()) {
      segment_final(operation, index);
    } else {
      offer(operation, members[flow.partial_to].id, index, false);
    }
    if (!flow.sources.empty()) combined(operation, index);
    // The contributions' memory is free again: their senders may send the next ones.
    for (const Source& from : flow.sources) {
      const PeerId& peer = members[from.rank].id;
      if (operation.window.contains(peer)) grant(operation, peer, 1);
    }
  }
  if (operation.unfinished == 0) events_.finished.push_back(ready.key);
}

// Copies the final bytes of a segment to the memory of its pieces.
void Executor::scatter(Operation& operation, std::uint32_t index, const Buffer& from) {
  const Segment& segment = operation.layout.segments[index];
  std::size_t at = 0;
  for (const Piece& piece : operation.layout.pieces_of(segment)) {
    const std::size_t element = element_size(operation.spec.arrays[piece.array].dtype);
    std::memcpy(result_at(operation, segment.chunk, piece), from.data() + at,
                piece.count * element);
    at += piece.count * element;
  }
}

// A segment's final bytes have arrived, in `from` or, if that is empty, in their result memory.
void Executor::final_bytes(Operation& operation, std::uint32_t index, Buffer from) {
  // A second copy may arrive on another stripe. Keep the first: frames may be reading it.
  SegmentState& state = operation.segments[index];
  if (state.arrived) return;
  state.arrived = true;
  ready_.push_back({operation.spec.key, operation.token, index, std::move(from)});
}

void Executor::place_final(Operation& operation, std::uint32_t index, const Buffer& from) {
  if (operation.spec.quantization) {
    decode_result(operation, index, from);
  } else if (from) {
    scatter(operation, index, from);
  }
}

void Executor::segment_final(Operation& operation, std::uint32_t index) {
  SegmentState& state = operation.segments[index];
  if (state.finished) return;
  state.finished = true;
  --operation.unfinished;
  const ChunkFlow& flow = operation.schedule.chunks[operation.layout.segments[index].chunk];
  for (const std::uint32_t rank : flow.final_to) {
    offer(operation, operation.spec.world->members[rank].id, index, true);
  }
}

void Executor::contribution(Operation& operation, std::uint32_t index, std::uint32_t source,
                            Buffer buffer) {
  SegmentState& state = operation.segments[index];
  if (state.seen[source]) return;
  state.seen[source] = true;
  state.held.push_back({source, std::move(buffer)});
  if (state.missing > 1) {
    --state.missing;
  } else {
    ready_.push_back({operation.spec.key, operation.token, index, {}});
  }
}

// -- granting and sending

// Grants contributions to this rank. Those of few bytes come without a grant, unless their sender
// has asked for one.
void Executor::post_receives(Operation& operation) {
  std::set<std::uint32_t> contributors;
  // By rank: whether its contributions wait here for others, so that a window bounds their memory.
  std::map<std::uint32_t, bool> staged;
  // Partial results between hosts have no window: with one, members could wait for each other's
  // room in a circle. All members work through the chunks side by side. So none gets further ahead
  // than its neighbours' windows allow or, if it has no neighbours, than ChunkFlow::paced allows.
  for (const Segment& segment : operation.layout.segments) {
    const ChunkFlow& flow = operation.schedule.chunks[segment.chunk];
    for (const Source& source : flow.sources) {
      contributors.insert(source.rank);
      staged[source.rank] = staged[source.rank] || (flow.sources.size() > 1 && source.windowed &&
                                                    !in_result(operation, segment, source));
    }
    if (results_first(operation) && flow.final_from != kNobody)
      contributors.insert(flow.final_from);
  }
  const auto asks = [&](const PeerId& peer) {
    const auto said = early_.find(peer);
    if (said == early_.end()) return false;
    const auto early = said->second.operations.find(operation.spec.key);
    return early != said->second.operations.end() && early->second.asks;
  };
  for (const std::uint32_t rank : contributors) {
    const PeerId& peer = operation.spec.world->members[rank].id;
    const bool asked = asks(peer);
    if (unasked_bytes_from(operation, rank) <= options_.eager_bytes && !asked) continue;
    if (!staged[rank]) {
      grant(operation, peer, kUnlimited);
      continue;
    }
    const std::uint64_t segment_bytes = operation.spec.world->plan.segment_bytes;
    const std::uint64_t left =
        options_.buffer_bytes > granted_bytes_ ? options_.buffer_bytes - granted_bytes_ : 0;
    const std::uint64_t fits = left / 4 / segment_bytes / contributors.size();
    const auto window =
        static_cast<std::uint32_t>(std::clamp<std::uint64_t>(fits, 1, max_window(segment_bytes)));
    operation.window[peer] = window;
    operation.granted[peer] = 0;
    granted_bytes_ += window * segment_bytes;
    grant(operation, peer, window);
  }
}

void Executor::grant(Operation& operation, const PeerId& to, std::uint32_t credit) {
  const auto granted = operation.granted.find(to);
  if (credit == kUnlimited) {
    operation.granted.erase(to);
  } else if (granted != operation.granted.end()) {
    granted->second = plus(granted->second, credit);
  }
  link::FrameHeader header = header_for(operation, link::FrameType::ready);
  header.credit = credit;
  send_control(to, header);
}

void Executor::send_control(const PeerId& to, const link::FrameHeader& header) {
  ports_[to].control.push_back(header);
  links_.wake(to);
}

void Executor::offer(Operation& operation, const PeerId& to, std::uint32_t segment, bool final) {
  Outlet& outlet = operation.outlets[to];
  if (final) {
    outlet.finals.push_back(segment);
  } else {
    outlet.partials.emplace(operation.segments[segment].place, segment);
  }
  queue_turn(to, operation, outlet);
}

// Counts a segment as combined. Segments of later places may become sendable.
void Executor::combined(Operation& operation, std::uint32_t segment) {
  const std::uint32_t before = operation.combining;
  --operation.to_combine[operation.segments[segment].place];
  while (operation.combining < operation.to_combine.size() &&
         operation.to_combine[operation.combining] == 0) {
    ++operation.combining;
  }
  if (operation.combining == before) return;
  for (auto& [peer, outlet] : operation.outlets) queue_turn(peer, operation, outlet);
}

bool Executor::sendable(const Operation& operation, const Outlet& outlet) {
  if (!outlet.finals.empty()) return !results_first(operation) || outlet.eager || outlet.credit > 0;
  if (outlet.partials.empty() || (!outlet.eager && outlet.credit == 0)) return false;
  const auto [place, index] = *outlet.partials.begin();
  if (!operation.schedule.chunks[operation.layout.segments[index].chunk].paced) return true;
  return operation.combining >= operation.to_combine.size() ||
         place < operation.combining + max_window(operation.spec.world->plan.segment_bytes);
}

void Executor::queue_turn(const PeerId& to, Operation& operation, Outlet& outlet) {
  if (!sendable(operation, outlet)) return;
  if (!outlet.queued) {
    outlet.queued = true;
    ports_[to].turn.push_back(operation.spec.key);
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
    Operation* operation = find(key);
    if (operation == nullptr) continue;
    Outlet& outlet = operation->outlets[to];
    outlet.queued = false;
    if (!sendable(*operation, outlet)) continue;
    const bool final = !outlet.finals.empty();
    const std::uint32_t index = final ? outlet.finals.front() : outlet.partials.begin()->second;
    if (final) {
      outlet.finals.pop_front();
    } else {
      outlet.partials.erase(outlet.partials.begin());
    }
    const Segment& segment = operation->layout.segments[index];
    const ChunkFlow& flow = operation->schedule.chunks[segment.chunk];
    const bool accumulated = !final && !flow.sources.empty();
    link::FrameHeader header = header_for(*operation, link::FrameType::data);
    header.final = final;
    header.segment = index;
    header.payload_bytes =
        final ? result_bytes(*operation, index) : contributed_bytes(*operation, index);
    const bool unasked = !final || results_first(*operation);
    if (unasked && outlet.eager) {
      header.eager = true;
      frame.eager_bytes = header.payload_bytes;
      outlet.eager_left -= std::min<std::uint64_t>(outlet.eager_left, header.payload_bytes);
    } else if (unasked && outlet.credit != kUnlimited) {
      --outlet.credit;
    }
    frame.payload.clear();
    if (final && operation->spec.quantization) {
      frame.payload.push_back(link::vec(operation->results[index].data(), header.payload_bytes));
    } else if (!final && coded(*operation, segment.chunk, operation->spec.rank, flow.partial_to)) {
      frame.packed = encode_contribution(*operation, index, accumulated);
      frame.payload.push_back(link::vec(frame.packed.data(), header.payload_bytes));
    } else if (accumulated && apart(*operation, segment)) {
      frame.packed = std::move(operation->partials[index]);  // it is sent once
      frame.payload.push_back(link::vec(frame.packed.data(), header.payload_bytes));
    } else {
      for (const Piece& piece : operation->layout.pieces_of(segment)) {
        const ArrayRef& array = operation->spec.arrays[piece.array];
        const std::size_t element = element_size(array.dtype);
        // A raw contribution is this rank's elements. All other bytes are in result memory.
        const std::uint8_t* from = final || accumulated
                                       ? result_at(*operation, segment.chunk, piece)
                                       : own_at(*operation, segment.chunk, piece);
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
    frame.token = operation->token;
    frame.trailer = true;
    operation->traffic.tx_bytes += header.payload_bytes;
    const std::uint32_t plain = accumulated ? segment.accumulated_bytes : segment.raw_bytes;
    operation->traffic.saved_bytes += plain - std::min(plain, header.payload_bytes);
    if (sendable(*operation, outlet)) {
      outlet.queued = true;
      port.turn.push_back(key);
    }
    return true;
  }
  return false;
}

}  // namespace pccl::collective
