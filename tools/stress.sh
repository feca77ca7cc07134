#!/usr/bin/env bash
# stress.sh SANITIZERS [build]: builds the stress program with them (any that -fsanitize= takes:
# "address,undefined", "thread") in build/stress-SANITIZERS. Without "build" it also runs it: with
# threads for PCCL_STRESS_SECONDS, as long again while connections end, a third of that encrypted, a
# third with threads that map shared memory at one address, then with processes, PCCL_STRESS_KILLS
# of them killed and PCCL_STRESS_FREEZES frozen (the program's defaults otherwise).
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizers=$1
folder=build/stress-${sanitizers//,/-}

# .ci/run may build there at the same time.
mkdir -p "$folder"
exec {lock}>"$folder/lock"
if ! flock -n "$lock"; then
  echo "stress: waits for the build that has begun already (build/ahead.txt)"
  flock "$lock"
fi
cmake -S . -B "$folder" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPCCL_PYTHON=OFF -DPCCL_C=OFF \
  -DPCCL_STRESS=ON -DPCCL_UNITY=ON -DPCCL_WERROR=ON -DPCCL_SANITIZE="$sanitizers" \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" >/dev/null # half of -O2 -g's time to compile
cmake --build "$folder" --target pccl_stress
exec {lock}>&-
[ "${2:-}" != build ] || exit 0

# Older TSan run-times cannot start under the address randomisation of newer kernels. Containers may
# forbid turning it off; then the program runs as it is.
run=()
if setarch -R true 2>/dev/null; then run=(setarch -R); fi
# Nothing of this run leaves the machine.
export PCCL_BIND=127.0.0.1
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}
"${run[@]}" "$folder/pccl_stress"
"${run[@]}" "$folder/pccl_stress" cuts
# The same with workers and encryption, with keys that change all the time.
PCCL_THREADS=3 PCCL_SECRET=0123456789abcdefghijklmnopqrstuvwxyz PCCL_KEY_UPDATE_RECORDS=50 \
  PCCL_STRESS_SECONDS=$((${PCCL_STRESS_SECONDS:-20} / 3)) "${run[@]}" "$folder/pccl_stress" cuts
# The peers above map each other's memory at other addresses, where TSan connects nothing.
PCCL_STRESS_SECONDS=$((${PCCL_STRESS_SECONDS:-20} / 3)) "${run[@]}" "$folder/pccl_stress" memory
if [ "$sanitizers" = thread ]; then
  # It sees nothing of what processes share, and makes them so slow that many seem frozen.
  "${run[@]}" "$folder/pccl_stress" kills 20
else
  "${run[@]}" "$folder/pccl_stress" kills
  "${run[@]}" "$folder/pccl_stress" freezes
fi
