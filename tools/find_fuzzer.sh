#!/usr/bin/env bash
# find_fuzzer.sh: prints the first clang++ that can build the fuzz targets, or nothing. CLANGXX is
# tried first.
set -euo pipefail
for candidate in ${CLANGXX:-} clang++ clang++-{25..16}; do
  # Version 16 is the first that makes aggregates of values in parentheses.
  if command -v "$candidate" >/dev/null && echo '#include <optional>
      struct Pair { int a, b; };
      extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) {
        return std::optional<Pair>(std::in_place, 1, 2)->a - 1;
      }' | "$candidate" -std=c++20 -x c++ -fsanitize=fuzzer,address - -o /dev/null 2>/dev/null; then
    echo "$candidate"
    exit
  fi
done
