#!/usr/bin/env bash
# test.sh [VENV]: cross-compiles pccl for aarch64, and tests it in a Debian of that architecture,
# which runs under qemu's user-mode emulation. Then peers of both architectures reduce together and
# compare their bytes. Needs root (debootstrap, chroot, binfmt_misc); without root it says so and
# does nothing. The root and the build stay in build/aarch64, for the next time.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ "$(id -u)" -ne 0 ]; then
  echo "test-aarch64: skipped, needs root (debootstrap, chroot, binfmt_misc)"
  exit 0
fi
python=$(realpath "${1:-.venv}")/bin/python
build=$PWD/build/aarch64
root=$build/root
version=3.11  # of its Python
export PCCL_AARCH64_ROOT=$root

# --- The build: one for the extensions and the stress program.

compile() {
  cmake -S . -B "$build/cmake" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -DPCCL_WERROR=ON -DPCCL_UNITY=ON -DPCCL_ASSERTIONS=ON \
    -DCMAKE_TOOLCHAIN_FILE="$PWD/tools/aarch64/toolchain.cmake" \
    -DPCCL_C=OFF -DPCCL_TESTING=ON -DPCCL_STRESS=ON \
    -DPython_EXECUTABLE="$python" -DPython_INCLUDE_DIR="$root/usr/include/python$version" >/dev/null
  cmake --build "$build/cmake"
  rm -rf "$root/opt/pccl"
  mkdir -p "$root/opt/pccl"
  cp -r pccl "$root/opt/pccl/"
  cp -r adapters "$root/opt/pccl/pccl/"
  cp "$build"/cmake/_*.so "$root/opt/pccl/pccl/"
  cp "$build/cmake/pccl_stress" "$root/opt/"
}

# Runs a command in the root, with this tree at /src. Mounts vanish with it.
inside() {
  # shellcheck disable=SC2016
  unshare --mount --pid --fork bash -euc '
    root=$1; shift
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mkdir -p "$root/src"
    mount --bind . "$root/src"
    exec chroot "$root" env -i -C /src PATH=/usr/bin:/bin HOME=/tmp LC_ALL=C.UTF-8 PCCL_BIND=127.0.0.1 \
      PYTHONPATH=/opt/pccl:/opt/site PYTHONDONTWRITEBYTECODE=1 "$@"' - "$root" "$@"
}

export -f compile inside
export python build root version
tools/aarch64/root.sh "$(dirname "$(dirname "$python")")"
tools/stage.sh "aarch64: compile" bash -euc compile
tools/stage.sh "aarch64: stress" bash -euc 'inside PCCL_STRESS_SECONDS=${PCCL_STRESS_SECONDS:-20} PCCL_LOG_LEVEL=ERR /opt/pccl_stress'
tools/stage.sh "aarch64: stress in memory" bash -euc 'inside PCCL_STRESS_SECONDS=${PCCL_STRESS_SECONDS:-20} /opt/pccl_stress memory'
# Left out: the emulator answers TCP_INFO with 4 bytes, and limits no memory.
tools/stage.sh "aarch64: tests" bash -euc 'inside TEST_PATIENCE=5 PCCL_SIM_SCHEDULES=${PCCL_SIM_SCHEDULES:-1000} \
  python3 -P -m pytest -p no:cacheprovider -n 2 --dist worksteal --timeout 900 \
  --deselect tests/test_links.py::test_a_link_at_rest_has_a_heartbeat_in_each_interval \
  --deselect tests/test_shared_arrays.py::test_one_that_cannot_map_arrays_keeps_nobody_from_memory \
  tests/test_reduce.py tests/test_weighted.py tests/test_quantize.py tests/test_codec.py tests/test_links.py \
  tests/test_simulation.py tests/test_plain.py tests/test_shm.py tests/test_shared_arrays.py tests/test_smoke.py \
  tests/test_alltoall.py tests/test_halves.py tests/test_sync.py tests/test_sync_states.py'
tools/stage.sh "aarch64: mixed groups" "$python" tools/aarch64/mixed.py "$root"
