#!/usr/bin/env bash
# build.sh [--clean] [DIST]: the sdist and the wheel of a release, in DIST (dist/). Installs what it
# needs: system packages by tools/setup.sh, the rest in build/release. The wheel is made by this
# machine's compiler and runs on Linux systems with glibc 2.28 or newer. --clean: nothing that was
# compiled before is used again.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$PWD/build/release-wheel
if [ "${1:-}" = --clean ]; then
  rm -rf "$build"
  shift
fi
dist=${1:-dist}
venv=$PWD/build/release
python=$venv/bin/python
stubs=$PWD/build/stubs
platform=manylinux_2_28_x86_64
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
  tools/stage.sh stubs "$python" tools/wheel/stubs.py "$stubs"
fi

rm -rf "$dist"
# The tools are installed already, at known versions: no isolation. tools/check_package.sh builds a
# wheel from the sdist; this one comes from the tree, in a build folder of its own.
"$python" -m build --no-isolation --sdist --outdir "$work/plain" .
tools/stage.sh "compile and link" "$python" -m build --no-isolation --wheel --outdir "$work/plain" \
  -C build-dir="$build" \
  -C cmake.define.PCCL_BUNDLE_OPENSSL=ON \
  -C cmake.define.CMAKE_MODULE_LINKER_FLAGS="-L$stubs" .
export PATH="$venv/bin:$PATH"
tools/stage.sh "manylinux tag" "$python" -m auditwheel repair --plat "$platform" --wheel-dir "$work/repaired" "$work"/plain/*.whl
tools/stage.sh "licences and SBOM" "$python" tools/wheel/third_party.py "$work"/repaired/*.whl
mkdir -p "$dist"
mv "$work"/repaired/*.whl "$work"/repaired/*.cdx.json "$work"/plain/*.tar.gz "$dist"
tools/stage.sh checks "$python" tools/wheel/check.py "$dist"
