#!/usr/bin/env bash
# stage.sh NAME COMMAND...: runs the command between two headings, the second with the seconds it
# took.
set -euo pipefail
name=$1
shift
printf '== %s\n' "$name"
start=$SECONDS
status=0
"$@" || status=$?
if [ "$status" -eq 0 ]; then
  printf '== %s: %d s\n' "$name" $((SECONDS - start))
else
  printf '== %s: FAILED (exit %d) after %d s\n' "$name" "$status" $((SECONDS - start))
fi
exit "$status"
