"""Peers, a doctor and a master of runs over IPv6."""

from __future__ import annotations

import os
import sys

import pccl
from programs.peer import expected, say, start, x


def _reduce(count: int, world: int) -> None:
    total, info = pccl.allreduce(x(count), return_info=True)
    assert (total == expected(info)).all() and info.world_size == world, info


def reduce() -> None:
    """Reduces arrays of several sizes, then one for each line that it is told."""
    start()
    pccl.barrier()
    world = int(os.environ["PCCL_MIN_PEERS"])
    for count in (10, 20_000, 2_000_000):
        _reduce(count, world)
    say(event="reduced")
    for _ in sys.stdin:
        _reduce(100_000, world)
        say(event="again")


def serve_with_secret(listen: str) -> None:
    """`pccl master`, which says each line that it would print."""
    import pccl.master

    pccl.master.print = lambda line, **_: say(line=line)  # type: ignore[attr-defined]
    pccl.master.serve_with_secret(listen)
