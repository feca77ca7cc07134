"""Asks a master for its status, once for each line of its input. Prints JSON; null: no answer."""

from __future__ import annotations

import json
import sys

import pccl
from pccl import _core

for _ in sys.stdin:
    try:
        answer = json.dumps(_core.ask_status(sys.argv[1]))
    except pccl.PCCLError as error:
        print(error, file=sys.stderr)
        answer = "null"
    print(answer, flush=True)
