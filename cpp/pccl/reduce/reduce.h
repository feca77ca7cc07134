// Reduction kernels: pure functions on memory, vectorised for the processor that runs them.
#pragma once

#include <cstddef>
#include <span>

#include "pccl/base/dtype.h"

namespace pccl::reduce {

// One other member's share of a result: either its raw elements, or a partial result in the
// accumulation type.
struct Contribution {
  const void* data = nullptr;
  bool accumulated =
      false;  // true: elements of accumulation_type(dtype, op), accumulation_size long
};

// out[i] = own[i] op contributions[0][i] op contributions[1][i] ... , in exactly that order, in the
// accumulation type.
//
// `own` holds `count` elements of `dtype`. With `divisor` == 0 the result is partial: `out`
// receives the accumulation type. With `divisor` > 0 it is final: under avg it is divided by
// `divisor` (integers round toward zero), then `out` receives `dtype` (float to 16 bits: nearest,
// ties to even). `contributions` may be empty: then own is only converted. Integers wrap like
// NumPy's. min/max propagate NaN like NumPy's minimum/maximum. No pointer needs alignment. `out`
// may equal `own` or a contribution's data when their element sizes are equal, and overlaps nothing
// otherwise. Same bytes whichever instruction set runs (x86-64: baseline, AVX2, AVX-512), under the
// default floating-point environment. The accumulation type of 64-bit integers under avg is an
// integer of 128 bits, so a mean is never outside its inputs. A NaN result is always the positive
// quiet one without payload; only a final result of no contributions and no division keeps the bits
// of own, as does a partial one that needs no conversion.
void reduce(DataType dtype, ReduceOp op, const void* own,
            std::span<const Contribution> contributions, unsigned divisor, void* out,
            std::size_t count);

// The instruction set `reduce` uses here: "baseline", "avx2", "avx512".
[[nodiscard]] const char* instruction_set();

// For tests: use this instruction set from now on. False when this processor lacks it. Not
// thread-safe.
bool force_instruction_set(const char* name);

}  // namespace pccl::reduce
