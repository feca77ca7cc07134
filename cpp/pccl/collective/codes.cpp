#include "pccl/collective/codes.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "pccl/base/copy.h"
#include "pccl/reduce/reduce.h"
#include "pccl/reduce/weighted.h"

namespace pccl::collective {
namespace {

// Values that are combined and encoded at a time, so that they stay in the cache.
constexpr std::size_t kStep = 4096;

// Smaller arrays are sent exactly: most are scalars, and ranges and codes could take as many bytes.
constexpr std::uint64_t kExactBelow = 64;

struct Scratch {
  alignas(64) std::array<std::uint8_t, kStep * sizeof(double)> bytes;
  [[nodiscard]] std::uint8_t* data() { return bytes.data(); }
};

bool is_floating(DataType dtype) {
  return dtype == DataType::float16 || dtype == DataType::bfloat16 || dtype == DataType::float32 ||
         dtype == DataType::float64;
}

bool exact(const ArrayRef& array) { return !is_floating(array.dtype) || array.count < kExactBelow; }

// kStep, rounded down to whole blocks.
std::size_t step_of(const reduce::Quantization& how) { return kStep / how.block * how.block; }

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = (a ^ (b * 0x9e3779b97f4a7c15)) + 0x632be59bd9b4e019;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The seed of random rounding: the same in every attempt, different for every piece and for every
// rank that encodes it.
std::uint64_t seed_of(const wire::OpKey& key, std::uint32_t rank, std::uint32_t piece) {
  std::uint64_t seed = mix(key.admission, key.sequence);
  if (key.tagged) seed = mix(seed, mix(key.tag, 1));
  return mix(mix(seed, rank), piece);
}

}  // namespace

void prepare_codes(BufferPool& pool, RunningAttempt& attempt) {
  const OperationSpec& spec = attempt.spec;
  const Layout& layout = attempt.layout;
  for (const Segment& segment : layout.segments) {
    CodedBytes bytes;
    for (const Piece& piece : layout.pieces_of(segment)) {
      const ArrayRef& array = spec.arrays[piece.array];
      const DataType work = accumulation_type(array.dtype, spec.op);
      const bool whole = exact(array);
      const std::size_t codes =
          whole ? 0 : reduce::coded_size(spec.quantization, work, piece.count);
      const std::size_t raw = whole ? piece.count * element_size(array.dtype) : codes;
      const std::size_t wide =
          whole ? piece.count * accumulation_size(array.dtype, spec.op) : codes;
      bytes.raw += static_cast<std::uint32_t>(raw);
      bytes.accumulated += static_cast<std::uint32_t>(wide);
      bytes.result += static_cast<std::uint32_t>(raw);
    }
    attempt.coded.push_back(bytes);
  }
  attempt.results.resize(layout.segments.size());
  for (const ArrayRef& array : spec.arrays) {
    attempt.residuals.emplace_back();
    if (array.residual == nullptr || exact(array) || array.count == 0) continue;
    const std::size_t bytes = array.count * accumulation_size(array.dtype, spec.op);
    attempt.residuals.back() = pool.take(bytes);
    std::uint8_t* const to = attempt.residuals.back().data();
    const std::size_t members = spec.world->members.size();
    if (spec.op == ReduceOp::avg && members < array.residual_members) {
      const double factor = static_cast<double>(members) / array.residual_members;
      reduce::scale(accumulation_type(array.dtype, spec.op), array.residual, factor, to,
                    array.count);
    } else {
      copy(to, array.residual, bytes);
    }
  }
}

Buffer encode_contribution(BufferPool& pool, RunningAttempt& attempt, std::uint32_t index,
                           bool accumulated) {
  const OperationSpec& spec = attempt.spec;
  const Segment& segment = attempt.layout.segments[index];
  const CodedBytes& bytes = attempt.coded[index];
  Buffer buffer = pool.take(accumulated ? bytes.accumulated : bytes.raw);
  std::uint8_t* to = buffer.data();
  std::size_t wide_at = 0;
  Scratch values;
  Scratch decoded;
  for (std::uint32_t p = 0; p < segment.piece_count; ++p) {
    const Piece& piece = attempt.layout.pieces[segment.first_piece + p];
    const ArrayRef& array = spec.arrays[piece.array];
    const DataType work = accumulation_type(array.dtype, spec.op);
    const std::size_t element = element_size(array.dtype);
    const std::size_t wide = accumulation_size(array.dtype, spec.op);
    const std::uint8_t* own = attempt.own_at(segment.chunk, piece);
    const std::uint8_t* partial = !accumulated ? nullptr
                                  : attempt.apart(segment)
                                      ? attempt.partials[index].data() + wide_at
                                      : attempt.result_at(segment.chunk, piece);
    wide_at += piece.count * wide;
    if (exact(array)) {
      const std::size_t size = piece.count * (accumulated ? wide : element);
      std::memcpy(to, accumulated ? partial : own, size);
      to += size;
      continue;
    }
    const Buffer& kept = attempt.residuals[piece.array];
    const std::uint64_t seed = seed_of(spec.key, spec.rank, segment.first_piece + p);
    const std::size_t step = step_of(spec.quantization);
    for (std::size_t first = 0; first < piece.count; first += step) {
      const std::size_t n = std::min<std::size_t>(step, piece.count - first);
      const std::uint8_t* from = accumulated ? partial + first * wide : own + first * element;
      if (!accumulated && work != array.dtype) {
        reduce::reduce(array.dtype, spec.op, from, {}, 0, values.data(), n);
        from = values.data();
      }
      if (!kept) {
        reduce::encode(spec.quantization, work, from, first, n, piece.count, seed, to);
        continue;
      }
      std::uint8_t* residual = kept.data() + (piece.first + first) * wide;
      const reduce::Contribution left{residual, true};
      reduce::reduce(work, ReduceOp::sum, from, {&left, 1}, 0, values.data(), n);
      reduce::encode(spec.quantization, work, values.data(), first, n, piece.count, seed, to);
      reduce::decode(spec.quantization, work, to, first, n, piece.count, decoded.data());
      reduce::left_out(work, values.data(), decoded.data(), 1, residual, n);
    }
    to += reduce::coded_size(spec.quantization, work, piece.count);
  }
  return buffer;
}

Buffer decode_contribution(BufferPool& pool, const RunningAttempt& attempt, std::uint32_t index,
                           const Buffer& from, bool accumulated) {
  const OperationSpec& spec = attempt.spec;
  const Segment& segment = attempt.layout.segments[index];
  Buffer values = pool.take(segment.accumulated_bytes);
  std::uint8_t* to = values.data();
  const std::uint8_t* codes = from.data();
  for (const Piece& piece : attempt.layout.pieces_of(segment)) {
    const ArrayRef& array = spec.arrays[piece.array];
    const DataType work = accumulation_type(array.dtype, spec.op);
    const std::size_t wide = accumulation_size(array.dtype, spec.op);
    if (!exact(array)) {
      const std::size_t step = step_of(spec.quantization);
      for (std::size_t first = 0; first < piece.count; first += step) {
        const std::size_t n = std::min<std::size_t>(step, piece.count - first);
        reduce::decode(spec.quantization, work, codes, first, n, piece.count, to + first * wide);
      }
      codes += reduce::coded_size(spec.quantization, work, piece.count);
    } else if (accumulated) {
      std::memcpy(to, codes, piece.count * wide);
      codes += piece.count * wide;
    } else {
      reduce::reduce(array.dtype, spec.op, codes, {}, 0, to, piece.count);
      codes += piece.count * element_size(array.dtype);
    }
    to += piece.count * wide;
  }
  return values;
}

void combine_coded(BufferPool& pool, RunningAttempt& attempt, std::uint32_t index) {
  const OperationSpec& spec = attempt.spec;
  const Segment& segment = attempt.layout.segments[index];
  SegmentState& state = attempt.segments[index];
  const ChunkFlow& flow = attempt.schedule.chunks[segment.chunk];
  const auto divisor = static_cast<unsigned>(spec.world->members.size());
  const std::size_t step = step_of(spec.quantization);
  Buffer buffer = pool.take(attempt.coded[index].result);
  std::uint8_t* to = buffer.data();
  Scratch sum;
  Scratch values;
  // The offset of the next piece in a contribution, by the contribution's form.
  std::size_t raw_at = 0;
  std::size_t wide_at = 0;
  std::size_t coded_raw_at = 0;
  std::size_t coded_wide_at = 0;
  const auto is_coded = [&](const HeldContribution& held) {
    return attempt.is_coded(segment.chunk, flow.sources[held.source].rank, spec.rank);
  };
  const auto is_wide = [&](const HeldContribution& held) {
    return flow.sources[held.source].accumulated;
  };
  std::vector<reduce::Contribution> contributions(state.held.size());
  for (std::uint32_t p = 0; p < segment.piece_count; ++p) {
    const Piece& piece = attempt.layout.pieces[segment.first_piece + p];
    const ArrayRef& array = spec.arrays[piece.array];
    const DataType work = accumulation_type(array.dtype, spec.op);
    const std::size_t element = element_size(array.dtype);
    const std::size_t wide = accumulation_size(array.dtype, spec.op);
    const std::uint8_t* own = attempt.own_at(segment.chunk, piece);
    std::uint8_t* result = attempt.result_at(segment.chunk, piece);
    const std::size_t codes =
        exact(array) ? 0 : reduce::coded_size(spec.quantization, work, piece.count);
    const auto place = [&](const HeldContribution& held) {
      const std::size_t raw = is_coded(held) ? coded_raw_at : raw_at;
      const std::size_t accumulated = is_coded(held) ? coded_wide_at : wide_at;
      return held.buffer.data() + (is_wide(held) ? accumulated : raw);
    };
    if (exact(array)) {
      for (std::size_t i = 0; i < contributions.size(); ++i)
        contributions[i] = {place(state.held[i]), is_wide(state.held[i])};
      reduce::reduce(array.dtype, spec.op, own, contributions, divisor, result, piece.count);
      std::memcpy(to, result, piece.count * element);
      to += piece.count * element;
    } else {
      const Buffer& kept = attempt.residuals[piece.array];
      const std::uint64_t seed = seed_of(spec.key, kNobody, segment.first_piece + p);
      for (std::size_t first = 0; first < piece.count; first += step) {
        const std::size_t n = std::min<std::size_t>(step, piece.count - first);
        reduce::reduce(array.dtype, spec.op, own + first * element, {}, 0, sum.data(), n);
        if (kept) {
          std::uint8_t* residual = kept.data() + (piece.first + first) * wide;
          const reduce::Contribution left{residual, true};
          reduce::reduce(work, ReduceOp::sum, sum.data(), {&left, 1}, 0, sum.data(), n);
        }
        for (const HeldContribution& held : state.held) {
          const std::uint8_t* from = place(held);
          if (is_coded(held)) {
            reduce::decode(spec.quantization, work, from, first, n, piece.count, values.data());
            from = values.data();
          } else if (is_wide(held)) {
            from += first * wide;
          } else {
            reduce::reduce(array.dtype, spec.op, from + first * element, {}, 0, values.data(), n);
            from = values.data();
          }
          const reduce::Contribution next{from, true};
          reduce::reduce(work, spec.op, sum.data(), {&next, 1}, 0, sum.data(), n);
        }
        if (spec.op == ReduceOp::avg)
          reduce::reduce(work, spec.op, sum.data(), {}, divisor, sum.data(), n);
        // Values too large for the element type become infinite here. Encoding makes no others so:
        // narrow() saturates.
        reduce::fit(array.dtype, sum.data(), result + first * element, n);
        reduce::encode(spec.quantization, work, sum.data(), first, n, piece.count, seed, to);
        reduce::decode(spec.quantization, work, to, first, n, piece.count, values.data());
        reduce::narrow(array.dtype, values.data(), result + first * element, n);
        if (kept) {
          // The residual is added before the next division, so it is scaled back.
          const double scale = spec.op == ReduceOp::avg ? divisor : 1;
          reduce::left_out(work, sum.data(), values.data(), scale,
                           kept.data() + (piece.first + first) * wide, n);
        }
      }
      to += codes;
    }
    raw_at += piece.count * element;
    wide_at += piece.count * wide;
    coded_raw_at += exact(array) ? piece.count * element : codes;
    coded_wide_at += exact(array) ? piece.count * wide : codes;
  }
  if (!flow.final_to.empty()) attempt.results[index] = std::move(buffer);
}

void decode_result(RunningAttempt& attempt, std::uint32_t index, const Buffer& from) {
  const OperationSpec& spec = attempt.spec;
  const Segment& segment = attempt.layout.segments[index];
  const std::size_t step = step_of(spec.quantization);
  const std::uint8_t* codes = from.data();
  Scratch values;
  for (const Piece& piece : attempt.layout.pieces_of(segment)) {
    const ArrayRef& array = spec.arrays[piece.array];
    const DataType work = accumulation_type(array.dtype, spec.op);
    const std::size_t element = element_size(array.dtype);
    std::uint8_t* result = attempt.result_at(segment.chunk, piece);
    if (exact(array)) {
      std::memcpy(result, codes, piece.count * element);
      codes += piece.count * element;
      continue;
    }
    for (std::size_t first = 0; first < piece.count; first += step) {
      const std::size_t n = std::min<std::size_t>(step, piece.count - first);
      reduce::decode(spec.quantization, work, codes, first, n, piece.count, values.data());
      reduce::narrow(array.dtype, values.data(), result + first * element, n);
    }
    codes += reduce::coded_size(spec.quantization, work, piece.count);
  }
}

}  // namespace pccl::collective
