"""Runs a function of tests/programs: python run_program.py MODULE:FUNCTION ARGUMENTS.

ARGUMENTS is JSON: [[positional...], {"keyword": value...}]. With TEST_NETNS in the environment the
process moves to that network namespace first. Python puts this file's folder, not the source tree,
at the head of sys.path: `pccl` is the installed one.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from programs import netns


def main() -> None:
    program, arguments = sys.argv[1:]
    if namespace := os.environ.get("TEST_NETNS"):
        netns.enter(namespace)
    module, _, function = program.partition(":")
    positional, keywords = json.loads(arguments)
    getattr(importlib.import_module(module), function)(*positional, **keywords)


if __name__ == "__main__":
    main()
