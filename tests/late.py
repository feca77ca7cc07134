"""Runs a program as a peer that the run waits for.

    python late.py ROLE TURN RESULT PROGRAM [ARGUMENTS]

ROLE is "early" or "late". At its admission point number TURN (counted from 1), an early peer says
so, and asks again until a newcomer has come in. So the newcomer, which the test starts then, enters
at that point, however long it takes to start. RESULT is an expression in the program's names, whose
value is shown at the end: numbers, text, arrays and what can be flattened to those.
"""

from __future__ import annotations

import hashlib
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import pccl
from pccl import api

END_TAG = 1 << 30
LOOK_SECONDS = 0.005  # between two looks: the newcomer needs the processor, too


def wait_for_a_newcomer(turn: int) -> None:
    """Wraps what asks for newcomers. All early members make the same calls, so all come here."""
    points = 0
    admitted = False  # by admit: the sync that follows is no admission point of its own
    # DiLoCo calls these; pccl.admit and pccl.sync do, too.
    admit, sync = api.admit_and_stay, api.sync_and_stay
    pending = pccl.Communicator.are_peers_pending

    def reached() -> bool:
        nonlocal points
        points += 1
        return points == turn

    def wait(ask: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        print("waits for a newcomer", flush=True)
        while not ask(*args, **kwargs):
            time.sleep(LOOK_SECONDS)
        return True

    def admit_with_newcomer(*how: Any) -> bool:
        nonlocal admitted
        admitted = wait(admit, *how) if reached() else admit(*how)
        return admitted

    def sync_with_newcomer(*how: Any, **more: Any) -> Any:
        nonlocal admitted
        if not admitted and reached():
            _, _, _, timeout, comm = how
            wait(admit, comm, timeout)
        admitted = False
        return sync(*how, **more)

    def pending_with_newcomer(comm: pccl.Communicator, **kwargs: Any) -> bool:
        return wait(pending, comm, **kwargs) if reached() else pending(comm, **kwargs)

    api.admit_and_stay = admit_with_newcomer
    api.sync_and_stay = sync_with_newcomer
    pccl.Communicator.are_peers_pending = pending_with_newcomer  # type: ignore[method-assign]


def flat(value: Any) -> bytes:
    """A result's bytes, whatever library's array it is."""
    if isinstance(value, dict):
        return b"".join(flat(value[key]) for key in sorted(value))
    if isinstance(value, list | tuple):
        return b"".join(map(flat, value))
    if hasattr(value, "state_dict"):
        return flat(value.state_dict())
    if hasattr(value, "detach"):
        value = value.detach()
    if isinstance(value, bool | int | float | str | None):
        return repr(value).encode()
    return np.asarray(value).tobytes()


def main() -> None:
    role, turn, result, program, *arguments = sys.argv[1:]
    if role == "early":
        wait_for_a_newcomer(int(turn))
    sys.argv = [program, *arguments]
    names = runpy.run_path(program, run_name="__main__")
    names.setdefault("pccl", pccl)
    digest = hashlib.sha256(flat(eval(result, names))).hexdigest()[:16]
    comm = names.get("comm")  # of the explicit API, closed by now
    alone = comm is not None or not pccl.is_initialized()
    # The world's size is what this member sees now: others may have left. All count together.
    size = "alone" if alone else pccl.allreduce(1, op="sum", tag=END_TAG)
    print(f"ends with {digest} among {size}", flush=True)


main()
