"""A member that stays in its run, and newcomers that come and go."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import queue
import random
import signal
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np

import pccl
from programs.peer import expected, hear, say, start, x

BATCH = 8


def step(state: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """A step as of the peers that come and go; in between they are told to be measured."""
    state, info = pccl.sync(state, return_info=True)
    works = [pccl.allreduce_async(x(1000), tag=tag) for tag in range(3)]
    tree: dict[str, Any] = {"x": x(20_000), "n": 1}
    total, reduced = pccl.allreduce(tree, return_info=True)
    assert total["n"] == reduced.world_size and (total["x"] == expected(reduced)).all()
    for work in works:
        work.wait()
    state["step"] += 1
    return state, info.world_size


def stay() -> None:
    """Makes steps, and says "alone" when it is, once it was told to."""
    orders: queue.Queue[Any] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))

    threading.Thread(target=listen, daemon=True).start()
    start()
    say(event="in")
    state: dict[str, Any] = {"w": np.zeros(200_000), "step": 0}
    wanted = None
    while True:
        state, size = step(state)
        if wanted is None and not orders.empty():
            wanted = orders.get()
        if wanted and size == 1:
            del size
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            say(event="alone", step=state["step"])
            wanted = None
            orders.get()


def newcomer(told: int, rng: random.Random) -> None:
    """Makes steps until it is told to leave. Never returns."""
    leave: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: leave.append(1))
    status = 1
    try:
        comm = start()
        state: dict[str, Any] = {"w": np.ones(200_000), "step": -1}
        while not leave:
            state, size = step(state)
            os.write(told, b".")
        if rng.random() < 0.5:
            pccl.shutdown()  # else at exit, which is the same
        else:
            comm.close()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def come_and_go() -> None:
    """Forks newcomers, which is faster than to start them.

    Ends them by a leave, within a step, or before they are in.
    """
    import numpy.ma  # noqa: F401  # what the first sync would import in every child

    rng = random.Random(1)
    while True:
        for _ in range(0, hear(), BATCH):
            children = []
            for number in range(BATCH):
                heard, told = os.pipe()
                child = os.fork()
                if child == 0:
                    newcomer(told, rng)
                os.close(told)
                children.append((child, heard, number))
            early = rng.random() < 0.5
            for child, heard, number in children:
                if number == BATCH - 1 and early:
                    time.sleep(rng.random() * 0.05)  # the random moment
                else:
                    assert os.read(heard, 1), "a newcomer ended before it was in"
                os.kill(child, signal.SIGTERM if number < BATCH // 2 else signal.SIGKILL)
                os.close(heard)
            for child, _, number in children:
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                assert code == (0 if number < BATCH // 2 else -signal.SIGKILL), code
        say(event="over")
