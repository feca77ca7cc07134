"""Members that publish, and a follower."""

from __future__ import annotations

import os
import threading

import numpy as np
from members import in_threads

import pccl
from pccl.following.pair import Pair
from programs.peer import hear, say, start


def _state(revision: int, count: int) -> dict[str, object]:
    return {"w": np.full(count, revision, np.float32), "at": revision}


def serve() -> None:
    """Publishes the revisions that the test names, with so many elements; [] ends it.

    With [0, 0] it follows the others, too.
    """
    start()
    say(event="ready")
    while told := hear():
        if told == [0, 0]:
            pccl.follow().next()
            say(event="follows")
        else:
            pccl.publish(_state(*told), told[0])


def be_a_pair(number: int) -> None:
    """Both ends of a pair, until the test ends the process."""
    address = os.environ["PCCL_MASTER"]
    ends = [Pair(pccl.Communicator._of_own_group(number, address), "test") for _ in range(2)]
    assert in_threads([end.join for end in ends]) == [None, None]
    say(event="met")
    hear()


def train() -> None:
    """Reduces and publishes until the test says a word."""
    start(min_peers=2)
    ends = threading.Event()

    def listen() -> None:
        hear()
        ends.set()

    threading.Thread(target=listen, daemon=True).start()
    steps = again = 0
    going = True
    while going:
        total, info = pccl.allreduce(np.array([float(ends.is_set())]), return_info=True)
        going = total[0] < 2
        steps += 1
        # The first ones may run again, where the members find that they share memory.
        again += info.attempts - 1 if steps > 100 else 0
        pccl.publish(_state(steps, 10_000), steps)
        if steps == 100:
            say(event="step")
    say(event="done", again=again)


def follow() -> None:
    """Tells of each revision."""
    with pccl.follow() as follower:
        for found in follower:
            whole = bool((found.state()["w"] == found.revision).all())
            say(event="revision", revision=found.revision, whole=whole)
