"""Asks the masters for the status of the run, once for each line of its input.

Prints JSON: the address of the master that answered, and the status; null: no answer.
"""

from __future__ import annotations

import json
import sys

import pccl
from pccl.tools.status import ask_any

for _ in sys.stdin:
    try:
        answer = json.dumps(ask_any(sys.argv[1]))
    except pccl.PCCLError as error:
        print(error, file=sys.stderr)
        answer = "null"
    print(answer, flush=True)
