"""Runs a function of tests/programs: python run_program.py MODULE:FUNCTION ARGUMENTS.

ARGUMENTS is JSON: [[positional...], {"keyword": value...}].

With TEST_NETNS in the environment the
process moves to that network namespace first. Python puts this file's folder, not the source tree,
at the head of sys.path: `pccl` is the installed one.
"""

from __future__ import annotations

import json
import os
import sys

from programs import netns


def main() -> None:
    program, arguments = sys.argv[1:]
    if namespace := os.environ.get("TEST_NETNS"):
        netns.enter(namespace)
    from programs import shell  # loads pccl: only after the move

    shell.call(program, *json.loads(arguments))


if __name__ == "__main__":
    main()
