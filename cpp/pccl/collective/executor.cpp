#include "pccl/collective/executor.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "pccl/base/copy.h"
#include "pccl/reduce/reduce.h"
#include "pccl/topology/plan.h"

namespace pccl::collective {
namespace {

constexpr std::uint32_t kUnlimited = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint32_t kNoSource = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint32_t kMaxWindow = 64;
constexpr std::uint32_t kMaxPieces =
    16;  // of a segment that is sent and received in place; more are gathered
// Of one peer, about operations not called here: as many as may be open (master/group.h).
constexpr std::size_t kMaxEarlyOperations = 1 << 16;
constexpr std::size_t kMaxEarlyFrames = 1 << 16;
// Words that wait to be sent to one peer: about each operation that may be open, one.
constexpr std::size_t kMaxWords = 1 << 16;

iovec vec(const void* data, std::size_t size) { return {const_cast<void*>(data), size}; }

std::uint32_t plus(std::uint32_t credit, std::uint32_t more) {
  return credit > kUnlimited - more ? kUnlimited : credit + more;
}

}  // namespace

// ---- sizes and look-ups
// -------------------------------------------------------------------------------------------

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

// What that rank may have to send before it knows that we have called.
std::uint64_t Executor::unasked_bytes_from(const Operation& operation, std::uint32_t rank) const {
  std::uint64_t bytes = 0;
  for (std::uint32_t index = 0; index < operation.layout.segments.size(); ++index) {
    const Segment& segment = operation.layout.segments[index];
    const ChunkFlow& flow = operation.schedule.chunks[segment.chunk];
    for (const Source& source : flow.sources) {
      if (source.rank == rank)
        bytes +=
            contribution_bytes(operation, index, rank, operation.spec.rank, source.accumulated);
    }
    if (results_first(operation) && flow.final_from == rank) bytes += segment.raw_bytes;
  }
  return bytes;
}

const std::uint8_t* Executor::own_at(const Operation& operation, std::uint32_t chunk,
                                     const Piece& piece) {
  const ArrayRef& array = operation.spec.arrays[piece.array];
  const bool parts = operation.spec.what.kind == Kind::reduce_scatter;
  const std::uint64_t first = piece.first + (parts ? chunk * array.count : 0);
  return static_cast<const std::uint8_t*>(array.send) + first * element_size(array.dtype);
}

std::uint8_t* Executor::result_at(const Operation& operation, std::uint32_t chunk,
                                  const Piece& piece) {
  const ArrayRef& array = operation.spec.arrays[piece.array];
  const bool parts = operation.spec.what.kind == Kind::all_gather;
  const std::uint64_t first = piece.first + (parts ? chunk * array.count : 0);
  return operation.out[piece.array] + first * element_size(array.dtype);
}

bool Executor::apart(const Operation& operation, const Segment& segment) {
  return operation.spec.what.kind == Kind::reduce_scatter ||
         segment.accumulated_bytes != segment.raw_bytes;
}

link::FrameHeader Executor::header_for(const Operation& operation, link::FrameType type) const {
  link::FrameHeader header;
  header.type = type;
  header.signature = operation.spec.signature;
  header.key = operation.spec.key;
  header.attempt = operation.spec.attempt;
  return header;
}

// ---- starting and ending
// ------------------------------------------------------------------------------------------

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
  operations_[key] = std::move(owned);

  // What we can send without waiting for anybody: chunks whose journey starts here. (And alone, the
  // whole result.)
  for (std::uint32_t i = 0; i < operation.layout.segments.size(); ++i) {
    const ChunkFlow& flow = operation.schedule.chunks[operation.layout.segments[i].chunk];
    if (!flow.sources.empty()) continue;
    if (flow.owner()) {
      combine(operation, i);
    } else if (flow.partial_to != kNobody) {
      offer(operation, operation.spec.world->members[flow.partial_to].id, i, false);
    }
  }
  post_receives(operation);
  use_early(operation);
  if (operation.unfinished == 0 && operations_.contains(key)) events_.finished.push_back(key);
  return {};
}

void Executor::prepare(Operation& operation) {
  const OperationSpec& spec = operation.spec;
  const wire::EpochRecord& world = *spec.world;
  const Kind kind = spec.what.kind;
  const bool parts = kind == Kind::reduce_scatter || kind == Kind::all_gather;
  // A root has nothing to wait for: its results may be where they are.
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
      parts ? cut_parts(shapes, spec.op, static_cast<std::uint32_t>(world.members.size()),
                        world.plan.segment_bytes)
            : cut(shapes, spec.op, operation.schedule.shares, world.plan.segment_bytes);
  if (spec.quantization) {
    operation.straight =
        size.kind != wire::ScheduleKind::ring && size.kind != wire::ScheduleKind::host_ring;
    operation.regional = size.kind == wire::ScheduleKind::regional;
    prepare_codes(operation);
  }
  operation.segments.resize(operation.layout.segments.size());
  operation.partials.resize(
      widens || kind == Kind::reduce_scatter ? operation.layout.segments.size() : 0);
  for (std::uint32_t rank = 0; rank < world.members.size(); ++rank) {
    operation.ranks[world.members[rank].id] = rank;
  }
  std::map<std::uint32_t, std::uint64_t> unasked;  // by rank, what goes there first
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
    operation.segments[i].missing = static_cast<std::uint32_t>(flow.sources.size());
    operation.segments[i].seen.resize(flow.sources.size());
    if (flow.partial_to != kNobody) {
      unasked[flow.partial_to] +=
          contribution_bytes(operation, static_cast<std::uint32_t>(i), spec.rank, flow.partial_to,
                             !flow.sources.empty());
    }
    if (results_first(operation)) {
      for (const std::uint32_t to : flow.final_to) unasked[to] += segment.raw_bytes;
    }
  }
  for (const auto& [rank, amount] : unasked) {
    const PeerId& to = world.members[rank].id;
    Outlet& outlet = operation.outlets[to];
    if (amount > options_.eager_bytes)
      continue;  // the receiver grants by itself when it has posted
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

Traffic Executor::cancel(const wire::OpKey& key) {
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
  const Traffic moved = operation.traffic;
  operations_.erase(it);
  return moved;
}

Traffic Executor::commit(const wire::OpKey& key) {
  const auto it = operations_.find(key);
  if (it == operations_.end()) return {};
  const Operation& operation = *it->second;
  for (std::size_t i = 0; i < operation.spec.arrays.size(); ++i) {
    const ArrayRef& array = operation.spec.arrays[i];
    if (operation.out[i] == array.recv || array.count == 0) continue;
    const std::size_t bytes = array.count * element_size(array.dtype);
    if (bytes >= kPastCacheFrom) {
      copy_past_cache(array.recv, operation.out[i], bytes);
    } else {
      copy(array.recv, operation.out[i], bytes);
    }
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
      // Grants may be of an admission yet to come, two epochs from here.
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
    outlet->second.eager_left = 0;  // what it had reserved went with the port
  }
}

// ---- combining
// ----------------------------------------------------------------------------------------------------

// All contributions of the segment are here: combines them with our own elements.
void Executor::combine(Operation& operation, std::uint32_t index) {
  const Segment& segment = operation.layout.segments[index];
  SegmentState& state = operation.segments[index];
  const ChunkFlow& flow = operation.schedule.chunks[segment.chunk];
  const OperationSpec& spec = operation.spec;
  const unsigned divisor = flow.owner() ? static_cast<unsigned>(spec.world->members.size()) : 0;
  std::sort(state.held.begin(), state.held.end(),
            [](const Held& a, const Held& b) { return a.source < b.source; });
  if (spec.quantization && flow.owner()) return combine_coded(operation, index);
  // As they are to be combined: of codes, what they stand for.
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
  for (std::uint32_t p = 0; p < segment.piece_count; ++p) {
    const Piece& piece = operation.layout.pieces[segment.first_piece + p];
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
    // A root's results may be its elements.
    if (to != own || !contributions.empty())
      reduce::reduce(array.dtype, spec.op, own, contributions, divisor, to, piece.count);
    raw_at += piece.count * element;
    wide_at += piece.count * wide;
  }
  state.held.clear();
  if (flow.owner()) {
    segment_final(operation, index);
  } else {
    offer(operation, spec.world->members[flow.partial_to].id, index, false);
  }
}

// Final bytes of a segment of many pieces go where they belong.
void Executor::scatter(Operation& operation, std::uint32_t index, const Buffer& from) {
  const Segment& segment = operation.layout.segments[index];
  std::size_t at = 0;
  for (std::uint32_t p = 0; p < segment.piece_count; ++p) {
    const Piece& piece = operation.layout.pieces[segment.first_piece + p];
    const std::size_t element = element_size(operation.spec.arrays[piece.array].dtype);
    std::memcpy(result_at(operation, segment.chunk, piece), from.data() + at,
                piece.count * element);
    at += piece.count * element;
  }
}

// They are in `from`, or were received where they belong.
void Executor::final_bytes(Operation& operation, std::uint32_t index, Buffer from) {
  // A second copy may have been on its way on another stripe; frames may be reading the first.
  if (operation.segments[index].finished) return;
  if (operation.spec.quantization) {
    decode_result(operation, index, from);
    const std::uint32_t chunk = operation.layout.segments[index].chunk;
    if (!operation.schedule.chunks[chunk].final_to.empty())
      operation.results[index] = std::move(from);
  } else if (from) {
    scatter(operation, index, from);
  }
  segment_final(operation, index);
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
  const ChunkFlow& flow = operation.schedule.chunks[operation.layout.segments[index].chunk];
  if (--state.missing > 0) return;
  combine(operation, index);
  combined(operation, index);
  // Their memory is free again: the contributors may send the next ones.
  for (const Source& from : flow.sources) {
    const PeerId& peer = operation.spec.world->members[from.rank].id;
    const auto window = operation.window.find(peer);
    if (window == operation.window.end()) continue;
    grant(operation, peer, 1);
  }
}

// ---- granting and sending
// -----------------------------------------------------------------------------------------

// Tells contributors that we are ready for them. Those that send little do so unasked.
void Executor::post_receives(Operation& operation) {
  std::set<std::uint32_t> contributors;
  std::map<std::uint32_t, bool>
      staged;  // contributions wait for others: memory is bounded by a window
  // Partial results that travel on between hosts have none: with one, members could wait for room
  // at each other in a circle. All work through the chunks side by side, so none gets further ahead
  // than its neighbours' windows, or without neighbours its pace (ChunkFlow::paced), let it.
  for (const Segment& segment : operation.layout.segments) {
    const ChunkFlow& flow = operation.schedule.chunks[segment.chunk];
    for (const Source& source : flow.sources) {
      contributors.insert(source.rank);
      staged[source.rank] = staged[source.rank] || (flow.sources.size() > 1 && source.windowed);
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
    const auto window = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(fits, 1, kMaxWindow));
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

// Segments of later places may go out now.
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
         place < operation.combining + kMaxWindow;
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
    link::FrameHeader header;
    header.type = link::FrameType::eager_return;
    header.credit = static_cast<std::uint32_t>(port.eager_used);
    port.eager_used = 0;
    frame = link::make_frame(header);
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
    header.payload_bytes = final ? result_bytes(*operation, index)
                                 : contribution_bytes(*operation, index, operation->spec.rank,
                                                      flow.partial_to, accumulated);
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
      frame.payload.push_back(vec(operation->results[index].data(), header.payload_bytes));
    } else if (!final && coded(*operation, segment.chunk, operation->spec.rank, flow.partial_to)) {
      frame.packed = encode_contribution(*operation, index, accumulated);
      frame.payload.push_back(vec(frame.packed.data(), header.payload_bytes));
    } else if (accumulated && apart(*operation, segment)) {
      frame.payload.push_back(vec(operation->partials[index].data(), segment.accumulated_bytes));
    } else {
      for (std::uint32_t p = 0; p < segment.piece_count; ++p) {
        const Piece& piece = operation->layout.pieces[segment.first_piece + p];
        const ArrayRef& array = operation->spec.arrays[piece.array];
        const std::size_t element = element_size(array.dtype);
        // Our own elements start a chunk's journey; everything else was put where results go.
        const std::uint8_t* from = final || accumulated
                                       ? result_at(*operation, segment.chunk, piece)
                                       : own_at(*operation, segment.chunk, piece);
        frame.payload.push_back(vec(from, piece.count * element));
      }
      if (segment.piece_count > kMaxPieces) {
        frame.packed = pool_->take(header.payload_bytes);
        std::size_t at = 0;
        for (const iovec& part : frame.payload) {
          std::memcpy(frame.packed.data() + at, part.iov_base, part.iov_len);
          at += part.iov_len;
        }
        frame.payload = {vec(frame.packed.data(), at)};
      }
    }
    if (links_.is_checked(to)) header.checksum = link::checksum(header, frame.payload);
    frame.header = link::encode(header);
    frame.payload_bytes = header.payload_bytes;
    frame.token = operation->token;
    frame.trailer = true;
    operation->traffic.tx_bytes += header.payload_bytes;
    if (sendable(*operation, outlet)) {
      outlet.queued = true;
      port.turn.push_back(key);
    }
    return true;
  }
  return false;
}

// ---- receiving
// ----------------------------------------------------------------------------------------------------

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
  Operation* operation = find(header.key);
  if (operation == nullptr) {
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
    placement.where = {vec(placement.buffer.data(), header.payload_bytes)};
    return placement;
  }
  if (operation->spec.signature != header.signature) {
    // The master compares signatures and will name the odd one out; meanwhile nothing is mixed.
    events_.disagreement = true;
    return drain();
  }
  if (operation->spec.attempt != header.attempt) return drain();
  if (header.segment >= operation->layout.segments.size())
    return refuse("a segment beyond the operation's end");
  const Segment& segment = operation->layout.segments[header.segment];
  const ChunkFlow& flow = operation->schedule.chunks[segment.chunk];
  SegmentState& state = operation->segments[header.segment];
  placement.token = operation->token;
  if (header.final) {
    const auto rank = operation->ranks.find(from);
    if (rank == operation->ranks.end() || flow.final_from != rank->second) {
      return refuse("final bytes from a peer that does not have them");
    }
    if (header.payload_bytes != result_bytes(*operation, header.segment))
      return refuse("a segment of the wrong length");
    // A partial result that is still to be passed on lies where the final one goes; then this is no
    // honest final.
    if (state.missing > 0) return refuse("final bytes before this peer's contribution");
    if (state.finished) return drain();
    placement.kind = link::Placement::Kind::store;
    if (segment.piece_count > kMaxPieces || operation->spec.quantization) {
      placement.buffer = pool_->take(header.payload_bytes);
      placement.where = {vec(placement.buffer.data(), header.payload_bytes)};
      return placement;
    }
    for (std::uint32_t p = 0; p < segment.piece_count; ++p) {
      const Piece& piece = operation->layout.pieces[segment.first_piece + p];
      const std::size_t element = element_size(operation->spec.arrays[piece.array].dtype);
      placement.where.push_back(
          vec(result_at(*operation, segment.chunk, piece), piece.count * element));
    }
    return placement;
  }
  const std::uint32_t source = source_index(*operation, header.segment, from);
  if (source == kNoSource) return refuse("a contribution from a peer that makes none");
  if (header.payload_bytes != contribution_bytes(*operation, header.segment,
                                                 flow.sources[source].rank, operation->spec.rank,
                                                 flow.sources[source].accumulated)) {
    return refuse("a segment of the wrong length");
  }
  if (state.seen[source]) return drain();
  if (const auto granted = operation->granted.find(from); granted != operation->granted.end()) {
    if (granted->second == 0) return refuse("a segment that there was no room for yet");
    --granted->second;
  }
  placement.kind = link::Placement::Kind::store;
  placement.buffer = pool_->take(header.payload_bytes);
  placement.where = {vec(placement.buffer.data(), header.payload_bytes)};
  return placement;
}

// Early data leaves the room it had taken.
void Executor::unkeep(const PeerId& from, std::uint64_t bytes) {
  Port& port = ports_[from];
  port.eager_kept -= std::min(port.eager_kept, bytes);
  eager_consumed(from, bytes);
}

Status Executor::arrived(const PeerId& from, const link::FrameHeader& header, std::uint64_t token,
                         Buffer buffer, bool called) {
  Operation* operation = find(header.key);
  if (token == 0) {
    // Placed before the operation was called here. It may have been called since, or ended.
    if (header.attempt < abort_floor_ || header.key.admission != admission_ ||
        (operation == nullptr && called)) {
      unkeep(from, header.payload_bytes);
      return {};
    }
    Early& early = early_for(from, header);
    early.frames.push_back({header, std::move(buffer)});
    ++early_.at(from).frames;
    if (operation == nullptr) return {};
    use_early(*operation);
  } else {
    // release() drains what belonged to an operation that ended, so this one is running.
    if (operation == nullptr || operation->token != token) return {};
    operation->traffic.rx_bytes += header.payload_bytes;
    if (header.eager) eager_consumed(from, header.payload_bytes);
    if (header.final) {
      final_bytes(*operation, header.segment, std::move(buffer));
    } else {
      contribution(*operation, header.segment, source_index(*operation, header.segment, from),
                   std::move(buffer));
    }
  }
  if (operation->unfinished == 0) events_.finished.push_back(header.key);
  return {};
}

// A contribution was placed, and goes no further.
void Executor::ungrant(const PeerId& from, const link::FrameHeader& header, std::uint64_t token) {
  Operation* operation = find(header.key);
  if (header.final || operation == nullptr || operation->token != token) return;
  const auto granted = operation->granted.find(from);
  if (granted != operation->granted.end()) granted->second = plus(granted->second, 1);
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

// Where to keep that frame, of an operation not called here. What the peer granted and asked for an
// earlier attempt is void.
Executor::Early& Executor::early_for(const PeerId& from, const link::FrameHeader& header) {
  Early& early = early_[from].operations[header.key];
  if (header.attempt > early.attempt) {
    early.credit = 0;
    early.asks = false;
    early.attempt = header.attempt;
  }
  return early;
}

// What came for the operation before it was called here.
void Executor::use_early(Operation& operation) {
  std::vector<std::pair<PeerId, Early>> all;
  for (auto& [peer, said] : early_) {
    const auto it = said.operations.find(operation.spec.key);
    // A later attempt's is for the one after this.
    if (it == said.operations.end() || it->second.attempt > operation.spec.attempt) continue;
    forget_frames(peer, it->second);
    all.emplace_back(peer, std::move(it->second));
    said.operations.erase(it);
  }
  for (const auto& [peer, early] : all) {
    if (early.credit == 0 || early.attempt < operation.spec.attempt) continue;
    link::FrameHeader header = header_for(operation, link::FrameType::ready);
    header.credit = early.credit;
    (void)control(peer, header, true);
  }
  for (auto& [peer, early] : all)
    for (EarlyFrame& frame : early.frames) use_early(operation, peer, frame);
}

void Executor::use_early(Operation& operation, const PeerId& from, EarlyFrame& frame) {
  const link::FrameHeader& header = frame.header;
  if (header.signature != operation.spec.signature) {
    events_.disagreement = true;
    return;
  }
  if (header.attempt != operation.spec.attempt || header.segment >= operation.segments.size())
    return;
  const Segment& segment = operation.layout.segments[header.segment];
  if (header.final) {
    const auto rank = operation.ranks.find(from);
    if (rank == operation.ranks.end() || !results_first(operation) ||
        operation.schedule.chunks[segment.chunk].final_from != rank->second ||
        header.payload_bytes != segment.raw_bytes || operation.segments[header.segment].finished) {
      return;
    }
    operation.traffic.rx_bytes += header.payload_bytes;
    return final_bytes(operation, header.segment, std::move(frame.buffer));
  }
  const std::uint32_t source = source_index(operation, header.segment, from);
  if (source == kNoSource) return;
  const Source& known = operation.schedule.chunks[segment.chunk].sources[source];
  if (header.payload_bytes != contribution_bytes(operation, header.segment, known.rank,
                                                 operation.spec.rank, known.accumulated)) {
    return;  // the signature agrees, so an honest peer cannot be here; a dishonest one gains
             // nothing
  }
  operation.traffic.rx_bytes += header.payload_bytes;
  contribution(operation, header.segment, source, std::move(frame.buffer));
}

Status Executor::control(const PeerId& from, const link::FrameHeader& header, bool called) {
  if (header.type == link::FrameType::eager_return) {
    Port& port = ports_[from];
    port.eager_out -= std::min<std::uint64_t>(port.eager_out, header.credit);
    return {};
  }
  if (header.key.admission != admission_ || header.attempt < abort_floor_) {
    // Of an attempt that is over, or of an epoch this peer is about to hear of.
    if (header.attempt <= epoch_) return {};
  }
  Operation* operation = find(header.key);
  if (operation == nullptr || operation->spec.attempt < header.attempt) {
    if (operation == nullptr && header.attempt <= epoch_ && called) return {};
    if (!room_for_early(from, header.key))
      return Status(Code::refused, "grants for too many operations");
    Early& early = early_for(from, header);
    if (header.attempt < early.attempt) return {};  // overtaken by a later attempt's
    if (header.type == link::FrameType::ready) {
      early.credit = plus(early.credit, header.credit);
    } else {
      early.asks = true;
    }
    return {};
  }
  if (operation->spec.attempt != header.attempt) return {};
  if (operation->spec.signature != header.signature) {
    events_.disagreement = true;
    return {};
  }
  if (header.type == link::FrameType::ask) {
    const auto rank = operation->ranks.find(from);
    if (rank == operation->ranks.end()) return Status(Code::refused, "a question from a stranger");
    if (ports_[from].control.size() >= kMaxWords)
      return Status(Code::refused, "more questions than answers were fetched");
    // Small as it is, it fits: one grant for all of it.
    grant(*operation, from, kUnlimited);
    return {};
  }
  const auto outlet = operation->outlets.find(from);
  if (outlet == operation->outlets.end()) return {};
  Outlet& out = outlet->second;
  out.credit = plus(out.credit, header.credit);
  queue_turn(from, *operation, out);
  return {};
}

}  // namespace pccl::collective
