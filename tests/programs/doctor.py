"""Members of a run that a doctor looks at, and the doctor."""

from __future__ import annotations

import subprocess
import sys

import pccl
from programs.peer import expected, hear, say, start, x


def reduce_when_told() -> None:
    """Reduces with another member once it is told to."""
    start(min_peers=2)
    pccl.barrier()
    say(event="in")
    hear()
    total, info = pccl.allreduce(x(), return_info=True)
    say(event="done", right=bool((total == expected(info)).all()), size=info.world_size)


def look() -> None:
    """Says what `pccl doctor` says here."""
    command = [sys.executable, "-m", "pccl", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    say(event="doctor", status=done.returncode, screen=done.stdout or done.stderr)
