#!/usr/bin/env bash
# check_package.sh PYTHON [OPTION...]: what a user would get. Builds the sdist and lists it, builds
# the wheel from that sdist, installs the wheel with nothing but its dependencies in a clean
# environment, and imports it from outside the tree. PYTHON has the package "build", which gets the
# options.
set -euo pipefail
python=$1
shift
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Without --sdist or --wheel, build makes the wheel from the sdist it has just made.
"$python" -m build "$@" --outdir "$work/dist" .
sdist=$(echo "$work"/dist/*.tar.gz)
wheel=$(echo "$work"/dist/*.whl)
echo "-- $(basename "$sdist")"
tar -tzf "$sdist" | sort
echo "-- $(basename "$wheel")"
contents=$("$python" -m zipfile -l "$wheel")
echo "$contents"
if [[ $contents == *_testing* ]]; then
  echo "package: _testing is in the wheel" >&2
  exit 1
fi
if [[ $contents == *libpccl* || $contents == *pccl.h* ]]; then
  echo "package: the C library is in the wheel" >&2
  exit 1
fi
case $wheel in
  *-cp310-abi3-*) ;;
  *)
    echo "package: $(basename "$wheel") is not a stable-ABI wheel" >&2
    exit 1
    ;;
esac

"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -q "$wheel"
"$work/venv/bin/python" -m pip list
cd "$work"
venv/bin/python - <<'PYTHON'
import importlib.util
import sys

import pccl

assert importlib.util.find_spec("pccl._testing") is None, "_testing is installed"
assert importlib.util.find_spec("pccl.adapters") is not None, "pccl.adapters is missing"
assert importlib.util.find_spec("_pccl_torch") is not None, "_pccl_torch is missing"
assert not {"torch", "jax"} & set(sys.modules), "import pccl loaded a framework"
print("imported", pccl.__version__, "from", pccl.__file__)
PYTHON
venv/bin/pccl --version
