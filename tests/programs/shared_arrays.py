"""Arrays in shared memory, reduced where they are."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

import pccl
from programs.peer import expected, peer_id, say, start, value, x
from programs.shm import in_memory
from programs.sync_shell import limit_memory

Array = npt.NDArray[np.int64]


def reduce_as_told() -> None:
    """Reduces in memory, then what it is told: "shared", "private" or both in turn, by rank."""
    start()
    while True:
        total, info = pccl.allreduce(x(10), return_info=True)
        if info.epoch > 1:
            break
    say(event="in", peer=peer_id())
    kept: list[Array] = []

    def make(kind: str, count: int, fill: int) -> Array:
        array = (pccl.empty if kind == "shared" else np.empty)(count + 3, np.int64)
        array[...] = fill
        kept.append(array)
        return array[3:]

    for line in sys.stdin:
        order = json.loads(line)
        if order == "stop":
            break
        if order == "forget":
            kept.clear()
            say(event="forgotten")
            continue
        if order == "count":
            total, info = pccl.allreduce(x(10), return_info=True)
            say(event="count", mappings=open("/proc/self/maps").read().count("memfd:pccl"))
            continue
        kinds, count = order
        mine = value(peer_id())
        kind = kinds[pccl.rank() % len(kinds)]
        send, out = make(kind, count, mine), make(kind, count, -1)
        got, info = pccl.allreduce(send, out=out, return_info=True)
        ok = got is out and (out == expected(info)).all() and (send == mine).all()
        got, info = pccl.allreduce(send, out=send, return_info=True)
        ok = ok and got is send and (send == expected(info)).all()
        few, many = make(kind, count, 2)[:7], make(kind, count, 3)
        tree: dict[str, Any] = {"a": make(kind, count, mine), "b": [few, many]}
        sums, info = pccl.allreduce(tree, return_info=True)
        ok = ok and (sums["a"] == expected(info)).all() and (many == 3).all()
        for got, fill in zip(sums["b"], (2, 3), strict=True):
            ok = ok and (got == fill * info.world_size).all()
        say(event="done", ok=bool(ok), world=info.world_size, memory=in_memory(info, 2 * count + 7))
    pccl.shutdown()


def reduce_with_little_room() -> None:
    """Rank 1 can map a part of what the others share: each of its calls that was not in memory."""
    start()
    while pccl.allreduce(1, return_info=True)[1].epoch < 2:
        pass
    count = 8_000_000
    array, out = pccl.full(count, value(peer_id()), np.int64), pccl.zeros(count, np.int64)
    root = np.zeros(count, np.int64)
    pccl.barrier()
    if pccl.rank() == 1:
        limit_memory(48 << 20)
    pccl.barrier()  # the others share their arrays from here on
    elsewhere = []
    for call in range(20):
        _, info = pccl.allreduce(array, out=out, return_info=True)
        assert (out == expected(info)).all() and info.world_size == 3
        if not in_memory(info, count):
            elsewhere.append(call)
    pccl.broadcast(array, 2, out=root)
    pccl.broadcast(root, 2, out=out)
    same = bool((out == root).all())
    part = out[: count // 16]
    pccl.allreduce(part, out=part)
    ok = same and bool((part == 3 * root[: count // 16]).all())
    say(event="done", rank=pccl.rank(), ok=ok, elsewhere=elsewhere, epoch=info.epoch)
    pccl.shutdown()


def fork_between_two_arrays() -> None:
    first = pccl.zeros(10)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    mine = pccl.empty(10)
    mine[:] = 1 if child else 2
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0 if (mine == 2).all() else 1)
    os.read(ready[0], 1)
    os.write(go[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert (mine == 1).all(), mine
    del first, mine


def reduce_in_a_child() -> None:
    old = pccl.empty(70_001, np.int64)
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        say(event="over")
        sys.exit()
    # Where the parent had the inherited array's descriptor, this one has another's.
    other = pccl.full(70_001, -1, np.int64)
    start(min_peers=2)
    while True:
        old[:] = value(peer_id())
        total, info = pccl.allreduce(old, return_info=True)
        if info.epoch > 1 or not (total == expected(info)).all():
            break
    say(event="done", ok=bool((total == expected(info)).all()))
    old[:] = value(peer_id())
    total, info = pccl.allreduce(old, return_info=True)
    say(event="done", ok=bool((total == expected(info)).all()))
    assert (other == -1).all()
    pccl.shutdown()
    os._exit(0)


def trees_of_hundreds() -> None:
    start(min_peers=2)
    for turn in range(12):
        fresh = turn % 3 == 0
        if turn == 0 or fresh:
            leaves = [pccl.empty(500 + 37 * i, np.int64) for i in range(400)]
        for i, leaf in enumerate(leaves):
            leaf[:] = value(peer_id()) + i
        total, info = pccl.allreduce(leaves, return_info=True)
        n = info.world_size
        ok = all((t == expected(info) + n * i).all() for i, t in enumerate(total))
        if not ok:
            break
    say(event="done", ok=bool(ok))
    pccl.shutdown()
