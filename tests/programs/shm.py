"""Peers of one host, which reduce in shared memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import numpy as np

import pccl
from programs.peer import expected, peer_id, say, start, x


def in_memory(info: pccl.ReduceInfo, count: int) -> bool:
    """Whether an operation over `count` int64 used shared memory.

    Over the network, all elements are sent twice: to be combined, and as the result. In memory,
    each is laid out once.
    """
    others = info.world_size - 1
    return info.tx_bytes * info.world_size < 1.5 * 8 * count * others


def reduce(count: int) -> tuple[bool, pccl.ReduceInfo]:
    """Reduces into a new array and in place: whether both are exact, and the last one's info."""
    total, info = pccl.allreduce(x(count), return_info=True)
    in_place = x(count)
    _, last = pccl.allreduce(in_place, out=in_place, return_info=True)
    return bool((total == expected(info)).all() and (in_place == expected(last)).all()), last


def reduce_as_told() -> None:
    """Reduces until the plan is for shared memory (its epoch is the second), then as it is told."""
    start()
    ok, info = True, pccl.ReduceInfo()
    for _ in range(int(os.environ.get("WARM_UP", "100000"))):
        ok, info = reduce(10)
        if not ok or info.epoch > 1:
            break
    say(event="in", ok=ok, epoch=info.epoch, peer=peer_id())
    for line in sys.stdin:
        order = json.loads(line)
        if order == "stop":
            break
        if order == "admit":
            say(event="admitted", some=bool(pccl.admit()))
            continue
        ok, info = reduce(order)
        say(
            event="done",
            ok=ok,
            world=info.world_size,
            epoch=info.epoch,
            memory=in_memory(info, order),
            descriptors=len(os.listdir("/proc/self/fd")),
            mappings=open("/proc/self/maps").read().count("memfd:pccl"),
        )
    pccl.shutdown()


def wrong_collectives(comm: pccl.Communicator, count: int) -> Iterator[str]:
    """Makes each collective of `count` int64 in each form: those with a wrong result."""
    n, rank = pccl.world_size(), pccl.rank()
    line = np.arange(count)
    for make in (np.zeros, pccl.zeros):
        own, gathered = make(count, np.int64), make((n, count), np.int64)
        own[:] = line * n + rank
        whole = line * n + np.arange(n)[:, None]
        pccl.allgather(own, out=gathered)
        if (gathered != whole).any() or (own != whole[rank]).any():
            yield f"{make.__module__} allgather"
        gathered[:] = -1
        gathered[rank] = own
        comm.all_gather(gathered[rank], gathered)
        if (gathered != whole).any():
            yield f"{make.__module__} allgather in place"
        comm.reduce_scatter(gathered, own, op="sum")
        if (own != n * whole[rank]).any() or (gathered != whole).any():
            yield f"{make.__module__} reduce_scatter"
        for root in (0, n - 1):
            own[:] = whole[rank]
            into = make(count, np.int64)
            pccl.broadcast(own, root, out=into)
            if (into != whole[root]).any() or (own != whole[rank]).any():
                yield f"{make.__module__} broadcast"
            pccl.broadcast(own, root, out=own)
            if (own != whole[root]).any():
                yield f"{make.__module__} broadcast in place"


def collect_as_told() -> None:
    """As `reduce_as_told`, other collectives."""
    comm = start()
    while pccl.allreduce(1, return_info=True)[1].epoch < 2:
        pass
    say(event="in")
    for line in sys.stdin:
        say(event="done", wrong=list(wrong_collectives(comm, json.loads(line))))
    pccl.shutdown()


def reduce_until_one_is_lost() -> None:
    """Says each step, until two are left or it is put out."""
    start()
    while True:
        ok, info = reduce(10)
        if info.epoch > 1:
            break
    say(event="in")
    steps = 0
    memory = True
    try:
        while True:
            # Larger each time, so that others get new memory for the results each time.
            count = min(int(20_000 * 1.3**steps), 2_000_000)
            mine = x(count)
            array = mine.copy()
            _, info = pccl.allreduce(array, out=array, return_info=True)
            assert (array == expected(info)).all(), "a wrong sum"
            steps += 1
            if info.world_size == 2:
                pccl.allreduce(1)  # nobody is left out of the last one
                break
            memory = memory and in_memory(info, count)
            say(event="step")
        say(event="end", world=info.world_size, steps=steps, memory=memory)
    except pccl.errors.PCCLError as error:
        whole = bool((array == mine).all())
        say(event="out", kind=type(error).__name__, whole=whole)
