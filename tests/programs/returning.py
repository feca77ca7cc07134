"""Members with open calls whose connection to the master breaks."""

from __future__ import annotations

import os
import threading

import numpy as np

import pccl
from programs.peer import engine, hear, say, start, x


def call_many(calls: int) -> None:
    """Entries of all these calls, with descriptions, exceed the limit of a first message."""
    comm = start()
    say(event="in")
    hear()
    tree = {f"a layer with a long name {i}": np.ones(2, np.float32) for i in range(4)}
    works = [pccl.allreduce_async(tree, tag=n) for n in range(calls)]
    say(event="called", open=engine(comm).unfinished())
    for work in works:
        for array in work.wait().values():
            assert (array == pccl.world_size()).all()
    say(event="done")
    hear()


def call_before_memory_is_found() -> None:
    late = os.environ.get("LATE")
    start()
    if late:
        threading.Event().wait(0.5)  # longer than it takes to find the other one's memory
    pccl.allreduce(x())
    say(event="called")
    end = threading.Event()
    threading.Timer(4, end.set).start()  # twice the straggler timeout
    while not pccl.allreduce(int(end.is_set())):
        pass
    say(event="done")
    hear()


def call_many_that_a_loss_ends(count: int) -> None:
    comm = start()
    say(event="in")
    hear()
    x, made = np.ones(1, np.int64), np.zeros((count, 1), np.int64)
    handles = [comm.all_reduce_async(x, one, op="sum") for one in made]
    say(event="called", open=engine(comm).unfinished())
    say(event="ended", ends=sorted({handle.wait()[1] for handle in handles}))
    hear()
    comm.all_reduce(x, made[0], op="sum")
    say(event="done", made=int(made[0][0]))
