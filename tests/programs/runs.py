"""Peers of runs in which nobody dies."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

import pccl
from programs.peer import expected, float_sum, hear, peer_id, say, start, value, x


def sum_exactly() -> None:
    """Reduces arrays of several sizes, and tells the digest of averages of random numbers."""
    start()
    ok = True
    digest = hashlib.sha256()
    for count in (0, 1, 3, 100, 5000, 70_000, 300_001):
        mine = x(count)
        total, info = pccl.allreduce(mine, return_info=True)
        ok = ok and (total == expected(info)).all() and info.world_size == 3
        ok = ok and (mine == value(peer_id())).all()
        noise = np.random.default_rng(value(peer_id())).standard_normal(count).astype(np.float32)
        digest.update(pccl.allreduce(noise, "avg").tobytes())
        pccl.allreduce(mine, out=mine)
        ok = ok and (mine == expected(info)).all()
    say(event="done", ok=bool(ok), digest=digest.hexdigest(), rank=pccl.rank())


def reduce_a_mixed_tree() -> None:
    start()
    me = value(peer_id())
    tree = {
        "a": np.full((3, 4), me, np.float64),
        "b": [np.ones(5, np.int8), me, None],
        "c": (np.full((2, 2), me, np.int64).T[::-1], np.full((), 2.5, np.float32)),
    }
    result: Any
    result, info = pccl.allreduce(tree, return_info=True)
    want = expected(info)
    ok = (result["a"] == want).all() and (result["b"][0] == 2).all() and result["b"][1] == want
    ok = ok and (result["c"][0] == want).all()
    ok = ok and result["c"][1].shape == () and result["c"][1] == 5.0
    say(event="done", ok=bool(ok))


def reduce_many_leaves(leaves: int) -> None:
    """Reduces a tree of so many numbers, and one of a hundredth of them beside a large array."""
    start()
    total: Any
    total, info = pccl.allreduce([value(peer_id())] * leaves, return_info=True)
    again: Any = pccl.allreduce({"a": x(70_000), "b": [x(3)] * (leaves // 100)})
    want = expected(info)
    ok = all(leaf == want for leaf in total) and (again["a"] == want).all()
    ok = ok and all((leaf == want).all() for leaf in again["b"])
    say(event="done", ok=bool(ok), size=info.world_size)


def tagged_operations_in_any_order() -> None:
    start()
    order = list(range(200))
    random.Random(value(peer_id())).shuffle(order)
    works = {tag: pccl.allreduce_async(x(1 + 97 * tag) + tag, tag=tag) for tag in order}
    ok = True
    for tag, work in works.items():
        total = work.wait()
        assert work.info is not None
        ok = ok and (total == expected(work.info) + 8 * tag).all() and work.info.world_size == 8
    say(event="done", ok=bool(ok))


def step(count: int = 10, **more: object) -> None:
    """Reduces once and says "step"."""
    total, info = pccl.allreduce(x(count), return_info=True)
    ok = bool((total == expected(info)).all())
    say(event="step", size=info.world_size, ok=ok, **more)


def reduce_or_admit() -> None:
    """Told "reduce" or "admit", until "stop"."""
    start()
    say(event="in", size=pccl.world_size())
    while (order := hear()) != "stop":
        step(admitted=pccl.admit() if order == "admit" else None)


def reduce_without_admit() -> None:
    start()
    say(event="in", size=pccl.world_size(), rank=pccl.rank())
    step()
    hear()


def explicit_by_tags() -> None:
    """Joins by update_topology until there are three, reduces in each way of the explicit API."""

    with pccl.Communicator(os.environ["PCCL_MASTER"]) as comm:
        say(event="connected")
        while comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE) < 3:
            comm.update_topology()
        send, recv = np.full(1000, 1.0, np.float32), np.zeros(1000, np.float32)
        info = comm.all_reduce(send, recv, op=pccl.ReduceOp.SUM)
        handles = [
            comm.all_reduce_async(send, np.zeros_like(recv), op=pccl.ReduceOp.AVG, tag=tag)
            for tag in range(5)
        ]
        waited = [handle.wait() for handle in handles]
        outs = [np.zeros_like(recv) for _ in range(6)]
        descriptors = [
            pccl.ReduceOpDescriptor.from_numpy(send, out, float_sum(100 + i))
            for i, out in enumerate(outs)
        ]
        comm.all_reduce_multiple_with_retry(descriptors, max_in_flight=4)
        ok = (recv == 3).all() and all(w[0] for w in waited)
        ok = ok and all((out == 3).all() for out in outs)
        say(event="done", ok=bool(ok), size=info.local_world_size)
        hear()


# Calls that a test names.
CALLS: dict[str, Callable[[], object]] = {
    "barrier": lambda: pccl.barrier(),
    "ten": lambda: pccl.allreduce(x(10)),
    "hundred": lambda: pccl.allreduce(x(100)),
    "one more": lambda: pccl.allreduce(x(101)),
    "floats": lambda: pccl.allreduce(x(100, np.float64)),
    "maximum": lambda: pccl.allreduce(x(100), "max"),
    "large": lambda: pccl.allreduce(x(300_000)),
    "larger": lambda: pccl.allreduce(x(300_001)),
    "tree of a": lambda: pccl.allreduce({"a": x(5)}),
    "tree of b": lambda: pccl.allreduce({"b": x(5)}),
}


def after(**more: object) -> None:
    """Reduces once and says "after": an error before it has left no trace."""
    total, info = pccl.allreduce(x(10), return_info=True)
    say(event="after", ok=bool((total == expected(info)).all()), size=info.world_size, **more)
    hear()


def mismatch() -> None:
    """Makes the call it is told, and one that fits."""
    start()
    say(event="in", peer=peer_id())
    call = CALLS[hear()]
    try:
        call()
        say(event="result")
    except pccl.MismatchedCall as error:
        say(event="mismatch", peer=error.peer, text=str(error))
    after()


def deadlock() -> None:
    """Makes the call it is told, then the other one, then one that all make."""
    start()
    say(event="in")
    name = hear()
    began = time.monotonic()
    try:
        CALLS[name]()
        say(event="result")
    except pccl.Deadlock as error:
        say(event="deadlock", seconds=time.monotonic() - began, text=str(error))
    # The other call is covered: a member that comes to it gets the error too, once.
    try:
        CALLS["ten" if name == "barrier" else "barrier"]()
        say(event="result")
    except pccl.Deadlock:
        say(event="covered")
    after()


def reduce_when_told() -> None:
    start()
    say(event="in")
    hear()
    step()
    hear()


def deadline() -> None:
    """Told "early": calls with a deadline. Told "late": calls when it is told anything more."""
    start()
    say(event="in")
    order = hear()
    if order == "late":
        hear()
    try:
        pccl.allreduce(x(10), timeout=0.5 if order == "early" else None)
        say(event="result")
    except pccl.Timeout as error:
        say(event="timeout", result=error.result.name)
    after()


def alone() -> None:
    start()
    began = time.monotonic()
    a = x(10)
    assert pccl.admit() is True and pccl.admit() is False
    assert (pccl.allreduce(a) == a).all() and pccl.allreduce(3, "avg") == 3.0
    pccl.barrier()
    assert pccl.rank() == 0 and pccl.world_size() == 1
    pccl.shutdown()
    say(event="done", seconds=time.monotonic() - began)


def reduce_in_pair() -> None:
    start(min_peers=2)
    total, info = pccl.allreduce(x(200_000), return_info=True)
    say(event="done", ok=bool((total == expected(info)).all()), size=info.world_size)
    hear()


def drop_work() -> None:
    """Drops an operation that runs, and its arrays."""
    start()
    hear()
    out = np.zeros(200_000, np.int64)
    held = x(200_000)
    strided = np.ones(400_000, np.int64)[::2]
    alive = weakref.ref(held)
    pccl.allreduce_async(held, out=out)
    pccl.allreduce_async([strided, 1])
    del held
    gc.collect()
    say(event="called", held=alive() is not None)
    pccl.barrier()
    info: pccl.ReduceInfo
    _, info = pccl.allreduce(x(10), return_info=True)
    gc.collect()
    ok = bool((np.asarray(out) == expected(info)).all())
    say(event="done", ok=ok, held=alive() is not None)
