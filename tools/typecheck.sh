#!/usr/bin/env bash
# typecheck.sh PYTHON: mypy --strict over pccl with adapters as pccl.adapters, the way a wheel lays them out. mypy
# follows neither the redirect of an editable install nor the mapping in pyproject.toml, so it is given a folder of
# links.
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
ln -s "$root/adapters" "$view/pccl/adapters"
cd "$view"
"$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/build/mypy" --strict -p pccl
# What users' type checkers see, against the same folder.
MYPYPATH=$PWD "$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/build/mypy" --strict "$root"/tests/typing/*.py
