"""Peers of a run with several masters."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import numpy as np

import pccl
from programs.peer import expected, hear, peer_id, say, start, x


def reduce_in_steps(count: int, **options: Any) -> None:
    """Reduces `count` elements as often as it is told to. Every result is checked.

    Says after each hundredth step where it is; and at the end what all results hash to, and the
    longest time between two of them. Told 0, it ends.
    """
    start(**options)
    say(event="in", size=pccl.world_size(), peer=peer_id())
    step = 0
    while steps := int(hear()):
        digest = hashlib.sha256()
        longest, last = 0.0, time.monotonic()
        sizes = set()
        for _ in range(steps):
            out, info = pccl.allreduce(x(count) + step, return_info=True)
            step += 1
            want = expected(info) + (step - 1) * len(info.contributors)
            assert np.all(out == want), (step, out[:3], want)
            digest.update(out.tobytes())
            sizes.add(len(info.contributors))
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            if step % 100 == 0:
                say(event="at", step=step)
        say(event="done", step=step, digest=digest.hexdigest(), sizes=sorted(sizes), gap=longest)


def leave_when_told() -> None:
    """Says when it leaves, just before."""
    start()
    say(event="in")
    hear()
    say(event="leaves")
    pccl.shutdown()


def change_to_another_group() -> None:
    """Leaves the group, and begins another one with another peer that does so."""
    start()
    say(event="in")
    hear()
    pccl.shutdown()
    start(peer_group=1, min_peers=2)
    out, info = pccl.allreduce(x(10), return_info=True)
    say(event="done", ok=bool(np.all(out == expected(info))), size=len(info.contributors))


def change_to_own_group(number: int) -> None:
    """Leaves the group, and begins one of the library's own with another peer that does so."""
    start()
    say(event="in")
    hear()
    pccl.shutdown()
    comm = pccl.Communicator._of_own_group(number, os.environ["PCCL_MASTER"])
    comm._join("connect", min_peers=2, attempts=30, timeout=60, enter=True)
    total, info = pccl.allreduce(np.ones(10), return_info=True, comm=comm)
    say(event="done", ok=bool(np.all(total == 2)), size=len(info.contributors))


def join_and_fail(**options: Any) -> None:
    """Says why it cannot join."""
    try:
        start(**options)
    except pccl.PCCLError as error:
        say(event="failed", kind=type(error).__name__, text=str(error))


def reduce_until_it_is_lost(count: int) -> None:
    """Reduces until the run is over for it, and says how it ended."""
    start()
    say(event="in", size=pccl.world_size(), peer=peer_id())
    hear()
    try:
        while True:
            pccl.allreduce(x(count))
    except pccl.PCCLError as error:
        say(event="lost", kind=type(error).__name__, text=str(error))


def admit_a_newcomer(count: int) -> None:
    """Reduces and admits until the group has `count` members; then one more step."""
    start()
    say(event="in", peer=peer_id())
    while pccl.world_size() < count:
        pccl.admit()
        pccl.allreduce(x(10))
    out, info = pccl.allreduce(x(10), return_info=True)
    say(event="done", ok=bool(np.all(out == expected(info))), size=len(info.contributors))
