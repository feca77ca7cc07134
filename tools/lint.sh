#!/usr/bin/env bash
# lint.sh VENV: style, layering and language; changes nothing.
set -euo pipefail
venv=$1
cd "$(dirname "$0")/.."
status=0  # every check runs, whatever the others found
"$venv/bin/ruff" check . || status=1
"$venv/bin/ruff" format --check . || status=1
find cpp benchmarks -name '*.h' -print0 -o -name '*.inl' -print0 -o -name '*.cpp' -print0 |
  xargs -0 "$venv/bin/clang-format" --dry-run -Werror || status=1
"$venv/bin/python" tools/check_rooms.py || status=1
"$venv/bin/python" tools/check_classes.py || status=1
"$venv/bin/python" tools/check_text.py || status=1
exit "$status"
