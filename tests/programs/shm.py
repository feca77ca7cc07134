"""Peers of one host, which reduce in shared memory."""

from __future__ import annotations

import json
import os
import resource
import signal
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


def reduce_as_told(open_files: int | None = None) -> None:
    """Reduces until the plan is for shared memory (its epoch is the second), then as it is told.

    Args:
        open_files: The most descriptors that it may have.
    """
    if open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
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


def reduce_with_short_files() -> None:
    """Reduces as a program that did not ask for SIGXFSZ to be ignored, with `ulimit -f 1024`."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    start()
    for _ in range(5):
        ok, _ = reduce(1000)
        say(event="done", ok=ok)
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
        gathered[:] = line * n * n + np.arange(n)[:, None] * n + rank  # a part for each rank
        received = make((n, count), np.int64)
        comm.all_to_all(gathered, received)
        if (received != line * n * n + rank * n + np.arange(n)[:, None]).any():
            yield f"{make.__module__} all_to_all"
        for root in (0, n - 1):
            own[:] = whole[rank]
            into = make(count, np.int64)
            pccl.broadcast(own, root, out=into)
            if (into != whole[root]).any() or (own != whole[rank]).any():
                yield f"{make.__module__} broadcast"
            pccl.broadcast(own, root, out=own)
            if (own != whole[root]).any():
                yield f"{make.__module__} broadcast in place"


def wrong_trees(arrays: int) -> Iterator[str]:
    """Makes each collective of a tree of so many arrays: those with a wrong result.

    Some are empty, and kinds of memory and dtypes differ. Members write to their arrays as soon as
    a call has returned.
    """
    n, rank = pccl.world_size(), pccl.rank()
    dtypes = [np.int64, np.int8, np.float32, np.uint16]

    def tree(member: int) -> dict[str, np.ndarray]:
        made = {}
        for index in range(arrays):
            shape, dtype = (n * (index % 3), index % 7), dtypes[index % 4]
            array = (np.zeros if index % 5 == 0 else pccl.zeros)(shape, dtype)
            array[:] = (np.arange(array.size).reshape(shape) * 3 + member + index) % 50
            made[f"{index}"] = array
        return made

    def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
        return all((array == wanted[name]).all() for name, array in found.items())

    members = [tree(member) for member in range(n)]
    own, into = tree(rank), tree(n)
    gathered = pccl.allgather(own)
    for array in own.values():
        array.fill(-1 if array.dtype.kind != "u" else 1)
    if not same(gathered, {name: np.stack([each[name] for each in members]) for name in own}):
        yield "allgather"
    for root in (0, n - 1):
        own = tree(rank)
        pccl.broadcast(own, root, out=into)
        for array in own.values():
            array.fill(1)
        if not same(into, members[root]):
            yield "broadcast"
        own = tree(rank)
        pccl.broadcast(own, root, out=own)
        if not same(own, members[root]):
            yield "broadcast in place"
    own = tree(rank)
    parts = pccl.reduce_scatter(own, "max")
    for array in own.values():
        array.fill(1)
    largest = {name: np.max([each[name] for each in members], axis=0) for name in own}
    if not same(parts, {name: np.split(array, n)[rank] for name, array in largest.items()}):
        yield "reduce_scatter"
    own = tree(rank)
    exchanged = pccl.alltoall(own)
    for array in own.values():
        array.fill(1)
    mine = {
        name: np.concatenate([np.split(each[name], n)[rank] for each in members]) for name in own
    }
    if not same(exchanged, mine):
        yield "alltoall"


def collect_as_told() -> None:
    """As `reduce_as_told`, other collectives: of so many elements, or of so many arrays."""
    comm = start()
    while pccl.allreduce(1, return_info=True)[1].epoch < 2:
        pass
    say(event="in")
    for line in sys.stdin:
        what, count = json.loads(line)
        wrong = wrong_trees(count) if what == "arrays" else wrong_collectives(comm, count)
        say(event="done", wrong=list(wrong))
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
