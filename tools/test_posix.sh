#!/usr/bin/env bash
# test_posix.sh VENV [PYTEST ARGUMENTS]: builds the package with the implementation of os/ that
# other systems than Linux use, in build/posix-venv, and runs tests there. VENV has all else.
set -euo pipefail
venv=$(realpath "$1")
shift
cd "$(dirname "$0")/.."
python=$PWD/build/posix-venv/bin/python
if [ ! -x "$python" ]; then
  "$venv/bin/python" -m venv --without-pip build/posix-venv
fi
purelib() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# The packages of VENV, but not its pccl: the .pth files of a folder named here are ignored.
purelib "$venv/bin/python" >"$(purelib "$python")/others.pth"
# pip of VENV, for the other environment. Files that are compiled as one shadow each other's names.
tools/stage.sh "build, posix" "$venv/bin/python" -m pip --python "$python" install -q \
  --no-build-isolation --no-deps -e . \
  -C build-dir=build/posix -C cmake.define.PCCL_OS=posix -C cmake.define.PCCL_UNITY=ON \
  -C cmake.define.PCCL_WERROR=OFF
# The commands of the package and of its tests come from this environment first.
export PATH="${python%/*}:$venv/bin:$PATH" PCCL_C_BUILD=$PWD/build/posix
"$python" -c 'from pccl import _core; assert not _core.shares_memory()'
exec "$python" -m pytest "$@"
