#!/usr/bin/env bash
# build.sh [--clean] [--aarch64] [DIST]: the sdist and the wheel of a release, in DIST (dist/).
# Installs what it needs: system packages by tools/setup.sh, the rest in build/release. The wheel is
# made by this machine's compiler and runs on Linux systems with glibc 2.28 or newer.
# --clean: nothing that was compiled before is used again.
# --aarch64: adds the wheel for aarch64 to DIST, which has the other one. It is made by a cross
# compiler with the libraries of a Debian of that architecture. Needs root.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=$PWD/build/release
python=$venv/bin/python
processor=x86_64
clean=
while [[ "${1:-}" = --* ]]; do
  case $1 in
    --clean) clean=yes ;;
    --aarch64) processor=aarch64 ;;
    *) echo "build.sh: no option $1" >&2; exit 2 ;;
  esac
  shift
done
dist=${1:-dist}
build=$PWD/build/release-wheel
stubs=$PWD/build/stubs
options=()
if [ $processor = aarch64 ]; then
  build+=-aarch64
  stubs+=-aarch64
  export PCCL_AARCH64_ROOT=$PWD/build/aarch64/root
  export _PYTHON_HOST_PLATFORM=linux-aarch64  # Python's name for what the wheel is for
  options=(-C cmake.define.CMAKE_TOOLCHAIN_FILE="$PWD/tools/aarch64/toolchain.cmake")
fi
if [ -n "$clean" ]; then
  rm -rf "$build" build/openssl
  export CCACHE_DISABLE=1
fi
platform=manylinux_2_28_$processor
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

tools/stage.sh "release tools" tools/setup.sh "$venv"
pinned=$(grep -E '^(scikit-build-core|nanobind|build)==' requirements-dev.txt)
# Compared by content, so that a tree that has everything asks no registry.
wanted=$(cat tools/wheel/requirements.txt; echo "$pinned")
if [ "$wanted" != "$(cat "$venv/installed" 2>/dev/null || true)" ]; then
  # shellcheck disable=SC2086
  tools/stage.sh "install release tools" "$python" -m pip install -q -r tools/wheel/requirements.txt $pinned
  echo "$wanted" >"$venv/installed"
fi
if [ ! -f "$stubs/libstdc++.so" ] ||
  [ -n "$(find tools/wheel \( -name stubs.py -o -name 'compat*.c' \) -newer "$stubs/libstdc++.so")" ]; then
  [ $processor = x86_64 ] || tools/aarch64/root.sh "$venv"
  tools/stage.sh stubs "$python" tools/wheel/stubs.py "$stubs" $processor
fi

# For aarch64 it is that of the root, of today.
if [ $processor = aarch64 ]; then
  # shellcheck disable=SC2016
  tools/stage.sh OpenSSL bash -euc '
    chroot "$1" apt-get update -qq -o APT::Update::Error-Mode=any
    chroot "$1" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --only-upgrade libssl-dev
    ' - "$PCCL_AARCH64_ROOT"
else
  openssl=$PWD/build/openssl
  [ -f "$openssl/versions" ] || tools/stage.sh OpenSSL tools/wheel/openssl.sh "$openssl"
  export PCCL_WHEEL_OPENSSL=$openssl  # for third_party.py
  lib=$openssl/root/usr/lib/x86_64-linux-gnu
  options=(-C cmake.define.OPENSSL_INCLUDE_DIR="$openssl/root/usr/include"
    -C cmake.define.OPENSSL_SSL_LIBRARY="$lib/libssl.a"
    -C cmake.define.OPENSSL_CRYPTO_LIBRARY="$lib/libcrypto.a"
    -C cmake.define.CMAKE_CXX_STANDARD_LIBRARIES="$lib/libzstd.a $lib/libz.a"
    -C cmake.define.CMAKE_CXX_FLAGS="-isystem $openssl/root/usr/include/x86_64-linux-gnu")
fi

# The tools are installed already, at known versions: no isolation. tools/check_package.sh builds a
# wheel from the sdist; this one comes from the tree, in a build folder of its own.
if [ $processor = x86_64 ]; then
  rm -rf "$dist"
  "$python" -m build --no-isolation --sdist --outdir "$work/plain" .
fi
tools/stage.sh "compile and link" "$python" -m build --no-isolation --wheel --outdir "$work/plain" \
  -C build-dir="$build" \
  -C cmake.define.PCCL_BUNDLE_OPENSSL=ON "${options[@]}" \
  -C cmake.define.CMAKE_MODULE_LINKER_FLAGS="-L$stubs" .
export PATH="$venv/bin:$PATH"
# auditwheel offers the platforms of the processor that Python names.
repair="import platform, sys; platform.machine = lambda: '$processor'; from auditwheel.main import main; sys.exit(main())"
tools/stage.sh "manylinux tag" "$python" -c "$repair" repair --plat "$platform" --wheel-dir "$work/repaired" "$work"/plain/*.whl
tools/stage.sh "licences and SBOM" "$python" tools/wheel/third_party.py "$work"/repaired/*.whl
mkdir -p "$dist"
mv "$work"/repaired/*.whl "$work"/repaired/*.cdx.json "$dist"
[ $processor != x86_64 ] || mv "$work"/plain/*.tar.gz "$dist"
# The checks install the wheel that is for this machine.
tools/stage.sh checks env -u _PYTHON_HOST_PLATFORM "$python" tools/wheel/check.py "$dist"
