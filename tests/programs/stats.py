"""Peers that say what they know about themselves."""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from typing import Any

import numpy as np

import pccl
from programs.peer import engine, say, start


def shown() -> dict[str, Any]:
    stats = pccl.stats()
    return {**dataclasses.asdict(stats), "compression": stats.compression}


def reduce(calls: int, count: int, quantize: str | None = None) -> None:
    """Reduces some arrays, and says the statistics before and after, and the last one's info."""
    start()
    before = shown()
    info = pccl.ReduceInfo()
    for _ in range(calls):
        values = np.arange(count, dtype=np.float32)
        _, info = pccl.allreduce(values, return_info=True, quantize=quantize)
    say(event="reduced", before=before, after=shown(), info=dataclasses.asdict(info))
    pccl.barrier()
    pccl.shutdown()


def reduce_with_little_space(bytes_: int) -> None:
    """Reduces until its trace would have more than so many bytes, and after that."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, bytes_))  # Python ignores SIGXFSZ
    reduce(100, 10)


def meet() -> None:
    """Says when it begins to reduce, for each line of the test, and how long it waited."""
    start()
    pccl.barrier()
    say(event="ready")
    for line in sys.stdin:
        if json.loads(line) == "end":
            break
        say(event="begins", at=time.monotonic())
        _, info = pccl.allreduce(np.ones(int(json.loads(line))), return_info=True)
        say(event="met", **dataclasses.asdict(info))
    pccl.shutdown()


def admit_and_reduce(explicit: bool = False) -> None:
    """Lets newcomers in and reduces, each time it is told to; says the changes that it is told."""
    start()
    changes: list[dict[str, Any]] = []
    inside: list[str] = []

    def failing(change: pccl.MembershipChange) -> None:
        raise RuntimeError("of the callback")

    def told(change: pccl.MembershipChange) -> None:
        assert pccl.membership().epoch == change.epoch
        assert pccl.stats().rank == change.rank
        changes.append({**dataclasses.asdict(change), "inside": inside[-1:]})

    pccl.on_membership_change(failing)
    subscription = pccl.on_membership_change(told)
    say(event="ready", me=engine(pccl.api._use(None, "")).peer_id())
    for line in sys.stdin:
        what = json.loads(line)
        if what == "end":
            break
        if what == "remove":
            subscription.remove()
            subscription.remove()
            say(event="removed")
            continue
        inside.append("admit")
        pccl.admit()
        inside.append("allreduce")
        world = pccl.allreduce(1)
        inside.append("nothing")
        say(event="step", world=world, changes=changes, stats=shown())
        changes.clear()
    pccl.shutdown()


def come_back() -> None:
    """Reduces each time it is told to; says the changes that it is told. Comes back if put out."""
    start()
    told: list[dict[str, Any]] = []

    def note(change: pccl.MembershipChange) -> None:
        told.append(dataclasses.asdict(change))

    first = pccl.on_membership_change(note)
    say(event="ready")
    for _ in sys.stdin:
        try:
            world = pccl.allreduce(1)
        except pccl.PCCLError as error:
            assert error.advice == "rejoin", error
            pccl.shutdown()
            pccl.init()
            assert pccl.on_membership_change(note) is first  # a program may do it each time
            world = 0
            say(event="back")
        pccl.admit()
        say(event="step", world=world, me=engine(pccl.api._use(None, "")).peer_id(), changes=told)
        told.clear()


def leave_and_join_again() -> None:
    """Leaves, and is told of nobody when it has joined again."""
    told: list[pccl.MembershipChange] = []
    start()
    pccl.on_membership_change(told.append)
    pccl.admit()
    pccl.shutdown()
    pccl.init()
    pccl.admit()
    say(event="done", told=len(told))
    pccl.shutdown()


def connect() -> None:
    """The explicit API: a callback from before the connection."""
    import os

    comm = pccl.Communicator(os.environ["PCCL_MASTER"])
    told: list[pccl.MembershipChange] = []
    comm.on_membership_change(told.append)
    comm.connect()
    (change,) = told
    assert change.joined == change.peers and change.lost == () and change.rank == 0
    assert comm.stats().world_size == 1
    comm.close()
    try:
        comm.stats()
    except pccl.InvalidUsage as error:
        say(event="closed", text=str(error))
