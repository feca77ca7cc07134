#!/usr/bin/env bash
# build_site.sh PYTHON: the pages of docs/ and the reference made from docstrings, as a site in
# build/site. Warnings are errors. Prints only what is wrong: with --quiet, mkdocs would count no
# warnings.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$(cd "$(dirname "$1")" && pwd):$PATH"  # mkdocstrings formats signatures with ruff
export NO_MKDOCS_2_WARNING=1                         # a notice of the theme's authors
mkdir -p build
if ! "$1" -m mkdocs build --strict >build/docs.txt 2>&1; then
  grep -v '^INFO' build/docs.txt >&2
  exit 1
fi
