#include "pccl/reduce/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cassert>
#include <iterator>
#include <string_view>

#include "pccl/reduce/kernels.h"

namespace pccl::reduce {
namespace {

struct InstructionSet {
  const char* name;
  const KernelTable* table;
  bool (*supported)();
};

#if defined(__x86_64__)
// Older versions of clang do not know this feature by name.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

// Best first.
constexpr InstructionSet kInstructionSets[] = {
#if defined(__x86_64__)
    {"avx512", &kAvx512Kernels,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     }},
    {"avx2", &kAvx2Kernels, [] { return __builtin_cpu_supports("avx2") && has_f16c(); }},
#endif
    {"baseline", &kBaselineKernels, [] { return true; }},
};

const InstructionSet*& chosen() {
  static const InstructionSet* set = [] {
    const InstructionSet* best = std::begin(kInstructionSets);
    while (!best->supported()) ++best;  // the last one always is
    return best;
  }();
  return set;
}

}  // namespace

void reduce(DataType dtype, ReduceOp op, const void* own,
            std::span<const Contribution> contributions, unsigned divisor, void* out,
            std::size_t count) {
  if (count == 0) return;
  const Kernel kernel =
      chosen()->table->kernels[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
  assert(kernel != nullptr);
  kernel(own, contributions.data(), contributions.size(), divisor, out, count);
}

const KernelTable& kernel_table() { return *chosen()->table; }

const char* instruction_set() { return chosen()->name; }

bool force_instruction_set(const char* name) {
  for (const InstructionSet& set : kInstructionSets) {
    if (std::string_view(set.name) == name && set.supported()) {
      chosen() = &set;
      return true;
    }
  }
  return false;
}

}  // namespace pccl::reduce
