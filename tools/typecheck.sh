#!/usr/bin/env bash
# typecheck.sh PYTHON: mypy --strict over pccl with adapters as pccl.adapters, the way a wheel lays
# them out, then over what of tests/ uses it. mypy follows neither the redirect of an editable
# install nor the mapping in pyproject.toml, so it is given a folder of links.
set -euo pipefail
python=$1
cd "$(dirname "$0")/.."
root=$PWD
view=build/typing
rm -rf "$view"
mkdir -p "$view/pccl"
for entry in pccl/*; do
  case $entry in *.py | *.pyi | pccl/py.typed) ln -s "$root/$entry" "$view/$entry" ;; esac
  if [ -d "$entry" ] && [ "${entry##*/}" != __pycache__ ]; then ln -s "$root/$entry" "$view/$entry"; fi
done
ln -sfn "$root/adapters" "$view/pccl/adapters"
ln -sfn "$root/_pccl_torch" "$view/_pccl_torch"
cd "$view"
check() { "$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/build/mypy" --strict "$@"; }
check -p pccl -p _pccl_torch
# The types that users see, against the same folder.
MYPYPATH=$PWD check "$root"/tests/typing/*.py
# The programs that tests run, and what runs them.
MYPYPATH=$PWD:$root/tests check "$root"/tests/programs/*.py "$root"/tests/{run_program,workers,namespaces}.py
