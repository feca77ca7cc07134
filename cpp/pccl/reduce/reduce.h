// Reduction kernels: pure functions on memory, vectorised for the processor in use.
#pragma once

#include <cstddef>
#include <span>

#include "pccl/base/dtype.h"

namespace pccl::reduce {

// The contribution of another member.
struct Contribution {
  const void* data = nullptr;
  bool accumulated = false;  // true: a partial result in the accumulation type; false: elements
};

// out[i] = own[i] op contributions[0][i] op contributions[1][i] ..., in exactly this order, in the
// accumulation type.
//
// `own` holds `count` elements of `dtype`. With `divisor` == 0 the result is partial: `out`
// receives values of the accumulation type. With `divisor` > 0 it is final: under avg it is divided
// by `divisor` (integers round toward zero); then `out` receives elements of `dtype` (8-bit and
// 16-bit floats: rounded to nearest, ties to even). Without contributions, own is only converted.
// Complex numbers are summed and divided part by part.
//
// Integers wrap, and min/max propagate NaN, as in NumPy. 64-bit integers under avg are summed in
// 128 bits. A NaN result is always the positive quiet NaN without payload, except that a result
// without contributions, division and conversion keeps the bits of own. All instruction sets
// (x86-64: baseline, AVX2, AVX-512; aarch64: NEON) give the same bytes in the default
// floating-point environment.
//
// No pointer needs alignment. REQUIRES: combines(dtype, op); `out` equals `own` or a contribution's
// data, with equal element sizes, or overlaps neither.
void reduce(DataType dtype, ReduceOp op, const void* own,
            std::span<const Contribution> contributions, unsigned divisor, void* out,
            std::size_t count);

// The instruction set in use: "baseline", "avx2" or "avx512". On aarch64 the baseline has NEON.
[[nodiscard]] const char* instruction_set();

// For tests: selects the instruction set. False: this processor lacks it. Not thread-safe.
bool force_instruction_set(const char* name);

}  // namespace pccl::reduce
