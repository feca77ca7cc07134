#!/usr/bin/env bash
# test_in_root.sh DIST: the wheel of DIST in systems that have no compiler and, in the second of two
# runs each, no OpenSSL either. Each is a root of its own made by debootstrap, without network but
# loopback. Without root it says so and does nothing.
#
#   bookworm   Python 3.11
#   sid        Python 3.14 or newer
#   3.10       if this machine has a python3.10: its folder inside bookworm's root
#   bullseye   glibc 2.31 and GCC 10's libstdc++: the extension finds all but Python's symbols
set -euo pipefail
dist=$(realpath "$1")
cd "$(dirname "$0")/../.."
if [ "$(id -u)" -ne 0 ]; then
  echo "package-test: skipped, needs root (debootstrap, chroot, namespaces)"
  exit 0
fi
wheel=$(find "$dist" -name "*_$(uname -m).whl" 2>/dev/null || true)
if [ ! -f "$wheel" ]; then
  echo "package-test: no wheel in $dist; run make package first" >&2
  exit 1
fi
missing=()
for tool in debootstrap unshare ip; do
  command -v "$tool" >/dev/null || missing+=("${tool/#ip/iproute2}")
done
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]/#unshare/util-linux}"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The pip that fills the roots; it is not inside them.
pip=("${PYTHON:-$PWD/build/release/bin/python}" -m pip)

make_root() {  # SUITE PACKAGES
  debootstrap --variant=minbase ${2:+--include="$2"} "$1" "$work/$1" >"$work/$1.log" 2>&1 ||
    { tail -n 5 "$work/$1.log" >&2; return 1; }
}

# Runs COMMAND in a root: own mounts, processes and network. Mounts vanish with it.
inside() {  # ROOT COMMAND...
  # shellcheck disable=SC2016
  unshare --mount --net --pid --fork bash -euc '
    root=$1; shift
    ip link set lo up
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    if [ -n "${WITH:-}" ]; then mkdir -p "$root$WITH"; mount --bind "$WITH" "$root$WITH"; fi
    exec chroot "$root" env -i PATH=/usr/bin:/bin HOME=/tmp PYTHONPATH=/opt/site "$@"' - "$@"
}

install_into() {  # ROOT VERSION
  rm -rf "$1/opt/site"
  "${pip[@]}" install -q --target "$1/opt/site" --only-binary=:all: --implementation cp \
    --python-version "$2" "$wheel"
  cp tools/wheel/try_wheel.py "$1/opt/"
}

without_openssl() { find "$1"/{lib,lib64,usr/lib} -xdev \( -name 'libssl*' -o -name 'libcrypto.*' \) -delete; }

try() {  # SUITE PYTHON
  local version
  version=$(inside "$work/$1" "$2" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  install_into "$work/$1" "$version"
  inside "$work/$1" "$2" /opt/try_wheel.py ${3:-}
}

failed=()
for suite in bookworm sid; do
  if tools/stage.sh "root $suite" bash -c "$(declare -f make_root); work=$work; make_root $suite python3"; then
    try "$suite" /usr/bin/python3 || failed+=("$suite")
    without_openssl "$work/$suite"
    try "$suite" /usr/bin/python3 --bare || failed+=("$suite without OpenSSL")
  else
    failed+=("debootstrap $suite")
  fi
done

# The newest root has gone through; bookworm's has no OpenSSL any more.
old=
for candidate in python3.10 "$HOME"/.pyenv/versions/3.10.*/bin/python3.10; do
  old=$("$candidate" -c 'import os, sys; print(os.path.realpath(sys.base_prefix))' 2>/dev/null) && break
done
if [ -n "$old" ] && [ "$old" != /usr ]; then
  WITH=$old try bookworm "$old/bin/python3.10" --bare || failed+=("python3.10")
else
  echo "package-test: no python3.10 of its own folder on this machine: not tried"
fi

if tools/stage.sh "root bullseye" bash -c "$(declare -f make_root); work=$work; make_root bullseye libstdc++6"; then
  mkdir -p "$work/bullseye/opt"
  unzip=("${pip[0]}" -m zipfile -e "$wheel" "$work/bullseye/opt/wheel")
  "${unzip[@]}"
  unresolved=$(inside "$work/bullseye" ldd -r /opt/wheel/pccl/_core.abi3.so 2>&1 |
    grep -E 'undefined symbol|not found' | grep -vE 'undefined symbol: _?Py' || true)
  if [ -n "$unresolved" ]; then
    echo "$unresolved" >&2
    failed+=(bullseye)
  else
    echo "passed: $(inside "$work/bullseye" ldd --version | sed -n 1p) resolves the extension"
  fi
else
  failed+=("debootstrap bullseye")
fi

if [ ${#failed[@]} -gt 0 ]; then
  printf 'package-test: FAILED: %s\n' "${failed[@]}" >&2
  exit 1
fi
