#!/usr/bin/env bash
# root.sh VENV: makes a Debian for aarch64 in build/aarch64/root, with the Python packages that
# tests need, and lets the kernel run its programs by qemu's user-mode emulation. Needs root.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(realpath "$1")/bin/python
build=$PWD/build/aarch64
root=$build/root
suite=bookworm
version=3.11  # of its Python

install_tools() {
  local missing=() tool
  for tool in aarch64-linux-gnu-g++ qemu-aarch64-static debootstrap; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  missing=("${missing[@]/aarch64-linux-gnu-g++/g++-aarch64-linux-gnu}")
  missing=("${missing[@]/qemu-aarch64-static/qemu-user-static}")
  if [ ${#missing[@]} -gt 0 ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
  fi
}

# The kernel starts programs of aarch64 by qemu. `F` loads the emulator now, so that it need not be
# inside the root.
let_kernel_run_it() {
  local handlers=/proc/sys/fs/binfmt_misc
  [ -e "$handlers/register" ] || mount -t binfmt_misc binfmt_misc "$handlers"
  [ -e "$handlers/qemu-aarch64" ] && return
  local magic='\x7f\x45\x4c\x46\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
  local mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
  printf ':qemu-aarch64:M::%s:%s:%s:F' "$magic" "$mask" "$(command -v qemu-aarch64-static)" \
    >"$handlers/register"
}

make_root() {
  [ -e "$root/made" ] && return
  rm -rf "$root"
  mkdir -p "$build"
  debootstrap --arch=arm64 --variant=minbase \
    --include=python3,libpython3-dev,libssl-dev,libasio-dev,libxxhash-dev,libstdc++6,iproute2 \
    "$suite" "$root" >"$build/root.log" 2>&1 || { tail -n 5 "$build/root.log" >&2; return 1; }
  # A wheel has this system's OpenSSL in it.
  echo "deb http://deb.debian.org/debian-security $suite-security main" >>"$root/etc/apt/sources.list"
  {
    chroot "$root" apt-get update -qq
    chroot "$root" env DEBIAN_FRONTEND=noninteractive apt-get upgrade -y -qq
  } >>"$build/root.log" 2>&1 || { tail -n 5 "$build/root.log" >&2; return 1; }
  touch "$root/made"
}

# Packages with machine code for aarch64, into the root.
install_packages() {
  local pins
  pins=$(grep -E '^(nanobind-backend|numpy|rich|ml_dtypes|pytest|pytest-timeout|pytest-xdist|hypothesis|safetensors)==' \
    requirements-dev.txt)
  [ "$pins" = "$(cat "$root/opt/pins" 2>/dev/null)" ] && return
  rm -rf "$root/opt/site"
  # shellcheck disable=SC2046
  "$python" -m pip install -q --target "$root/opt/site" --only-binary=:all: --implementation cp \
    --python-version "$version" --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 \
    $(echo "$pins" | grep -v 'python_version < "3.11"' | sed 's/;.*//')
  echo "$pins" >"$root/opt/pins"
}

export -f install_tools make_root install_packages
export python build root suite version
tools/stage.sh "aarch64: tools" bash -euc install_tools
let_kernel_run_it
tools/stage.sh "aarch64: Debian" bash -euc make_root
tools/stage.sh "aarch64: packages" bash -euc install_packages
