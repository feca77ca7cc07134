// Quantized operations. Segments between hosts are encoded and decoded in the loop that reads or
// combines them.
//
// A contribution is encoded when it leaves for another host, and the owner encodes the result. So
// every element is rounded twice (three times where contributions are combined by regions), however
// many members there are. In rings, partial results are sent exactly and elements are rounded once.
// All members, the owner included, take the values that the owner's codes decode to.
#pragma once

#include <cstdint>

#include "pccl/base/buffer.h"
#include "pccl/collective/attempt.h"

namespace pccl::collective {

// The lengths of all segments, and the residuals that are added before encoding.
void prepare_codes(BufferPool& pool, RunningAttempt& attempt);
// Encodes this rank's elements or, if `accumulated`, its partial result.
[[nodiscard]] Buffer encode_contribution(BufferPool& pool, RunningAttempt& attempt,
                                         std::uint32_t segment, bool accumulated);
// Decodes a contribution to the accumulation type.
[[nodiscard]] Buffer decode_contribution(BufferPool& pool, const RunningAttempt& attempt,
                                         std::uint32_t segment, const Buffer& from,
                                         bool accumulated);
// Combines a segment that this rank owns, and encodes the result. REQUIRES: all contributions are
// here.
void combine_coded(BufferPool& pool, RunningAttempt& attempt, std::uint32_t segment);
// Decodes a result to its place.
void decode_result(RunningAttempt& attempt, std::uint32_t segment, const Buffer& from);

}  // namespace pccl::collective
