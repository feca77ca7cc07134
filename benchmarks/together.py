"""Runs the ranks of a benchmark that are all the same program."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


def run_ranks(commands: Sequence[Sequence[str]], env: Mapping[str, str]) -> list[bytes]:
    """Returns the output of each command. Exits if one of them failed."""
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(env)) for command in commands
    ]
    try:
        outputs = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"ranks ended with {[rank.returncode for rank in ranks]}")
    return outputs
