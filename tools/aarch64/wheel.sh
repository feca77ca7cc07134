#!/usr/bin/env bash
# wheel.sh DIST: adds the wheel for aarch64 to DIST, where the other one is, and uses it in a Debian
# of that architecture, which runs under qemu's user-mode emulation. Needs root.
set -euo pipefail
dist=$(realpath "$1")
cd "$(dirname "$0")/../.."
if [ "$(id -u)" -ne 0 ]; then
  echo "package-aarch64: skipped, needs root (debootstrap, chroot, binfmt_misc)"
  exit 0
fi
tools/wheel/build.sh --aarch64 "$dist"
root=$PWD/build/aarch64/root
rm -rf "$root/opt/wheel"
build/release/bin/python -m pip install -q --target "$root/opt/wheel" --only-binary=:all: \
  --implementation cp --python-version 3.11 --platform manylinux_2_28_aarch64 \
  --platform manylinux2014_aarch64 "$dist"/*_aarch64.whl
cp tools/wheel/try_wheel.py "$root/opt/"
# shellcheck disable=SC2016
tools/stage.sh "aarch64: use the wheel" unshare --mount --net --pid --fork bash -euc '
  ip link set lo up
  mount -t proc proc "$1/proc"
  mount --rbind /dev "$1/dev"
  exec chroot "$1" env -i PATH=/usr/bin:/bin HOME=/tmp PYTHONPATH=/opt/wheel python3 /opt/try_wheel.py' - "$root"
