"""Benchmarks whose ranks all run the same program: its processes, and calls that take turns."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import pccl


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


def in_turns(
    calls: Mapping[str, Callable[[], object]], blocks: int, count: int
) -> dict[str, list[float]]:
    """In a rank: makes `blocks` blocks of `count` calls of each, in turn, after one that warms up.
    Returns the milliseconds of a call on the slowest rank, by block."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for block in range(blocks + 1):
        first = block % len(names)
        for name in names[first:] + names[:first]:
            pccl.allreduce(np.zeros(1), "max")
            begin = time.perf_counter()
            for _ in range(count):
                calls[name]()
            took = (time.perf_counter() - begin) / count
            slowest = pccl.allreduce(np.array([took]), "max")
            times[name].append(1000 * float(slowest[0]))
    return {name: values[1:] for name, values in times.items()}


def ratio_quartiles(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles of the ratios of each block; the middle one is the median."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high
