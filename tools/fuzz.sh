#!/usr/bin/env bash
# fuzz.sh [SECONDS|build [TARGET...]]: builds the fuzz targets with clang, libFuzzer, ASan and UBSan
# in build/fuzz. Without "build" it also runs each of them (control, link, manifest, neighbours) for
# so long (30 s), as many at a time as there are cores, from cpp/tests/fuzz/corpus/ and from seeds
# made of real messages. New inputs are kept in build/fuzz/corpus/ for the next run; failing inputs
# are kept in build/fuzz/crashes/ and printed.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-30}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(control link manifest neighbours)
folder=build/fuzz

compiler=$(tools/find_fuzzer.sh)
if [ -z "$compiler" ]; then
  echo "fuzz: no clang++ of version 16 or newer with libFuzzer (tools/setup.sh VENV fuzz installs one)" >&2
  exit 1
fi

# .ci/run may build there at the same time.
mkdir -p "$folder"
exec {lock}>"$folder/lock"
if ! flock -n "$lock"; then
  echo "fuzz: waits for the build that has begun already (build/ahead.txt)"
  flock "$lock"
fi
# Another compiler than the last time: from nothing.
if [ -f "$folder/compiler" ] && [ "$(cat "$folder/compiler")" != "$compiler" ]; then
  rm -rf "$folder/CMakeCache.txt" "$folder/CMakeFiles"
fi
echo "$compiler" >"$folder/compiler"
cmake -S . -B "$folder" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPCCL_PYTHON=OFF -DPCCL_C=OFF \
  -DPCCL_FUZZ=ON -DPCCL_UNITY=ON -DPCCL_SANITIZE=address,undefined -DCMAKE_CXX_COMPILER="$compiler" \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" >/dev/null
cmake --build "$folder" --target pccl_fuzz_seeds $(printf 'pccl_fuzz_%s ' "${targets[@]}")
exec {lock}>&-
[ "$seconds" != build ] || exit 0
rm -rf "$folder/seeds"
"$folder/pccl_fuzz_seeds" "$folder/seeds"

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:strict_string_checks=1:allocator_may_return_null=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
run() {
  local target=$1
  local corpus=$folder/corpus/$target crashes=$folder/crashes/$target status=0
  mkdir -p "$corpus" "$crashes"
  local from=("$corpus" "$folder/seeds/$target")
  [ ! -d "cpp/tests/fuzz/corpus/$target" ] || from+=("cpp/tests/fuzz/corpus/$target")
  "$folder/pccl_fuzz_$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -max_len=4096 -len_control=20 \
    -artifact_prefix="$crashes/" -print_final_stats=1 "${from[@]}" >"$folder/$target.log" 2>&1 || status=$?
  if [ "$status" -ne 0 ]; then
    echo "fuzz: $target failed:" >&2
    grep -v '^#' "$folder/$target.log" | tail -n 60 >&2
    for bytes in "$crashes"/*; do
      [ ! -f "$bytes" ] || echo "fuzz: $bytes: $(base64 -w0 "$bytes")" >&2
    done
    return 1
  fi
  echo "fuzz: $target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$folder/$target.log") runs," \
    "$(find "$corpus" -type f | wc -l) found"
}

# One that fails ends nothing: the others come to their ends, and say so.
cores=$(nproc)
running=0
failed=0
for target in "${targets[@]}"; do
  if [ "$running" -ge "$cores" ]; then
    wait -n || failed=1
    running=$((running - 1))
  fi
  run "$target" &
  running=$((running + 1))
done
while [ "$running" -gt 0 ]; do
  wait -n || failed=1
  running=$((running - 1))
done
exit "$failed"
