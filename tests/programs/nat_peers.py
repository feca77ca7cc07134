"""Peers behind NATs."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from typing import Any

import numpy as np

import pccl
from programs.links import links
from programs.peer import expected, hear, say, start, x


def reduce_everything() -> None:
    """Reduces arrays of several sizes, makes all the other collectives, then does as it is told."""
    began = time.monotonic()
    comm = start()
    pccl.barrier()
    for count in (10, 20_000, 2_000_000):
        total, info = pccl.allreduce(x(count), return_info=True)
        assert (total == expected(info)).all() and info.world_size == int(os.environ["WORLD"]), info
    rank, world = pccl.rank(), pccl.world_size()
    for count in (7, 300_000):
        assert (pccl.broadcast(np.full(count, rank), root=world - 1) == world - 1).all()
        every = pccl.allgather(np.full(count, rank))
        assert all((every[r] == r).all() for r in range(world))
        mine = pccl.reduce_scatter(np.full((world, count), rank + 1))
        assert (mine == world * (world + 1) // 2).all()
    say(event="reduced", seconds=time.monotonic() - began, schedules=str(comm.topology()))
    for line in sys.stdin:
        command = json.loads(line)
        if command == "end":
            break
        total, info = pccl.allreduce(x(100_000), return_info=True)
        say(event="again", right=bool((total == expected(info)).all()), size=info.world_size)
    pccl.shutdown()


def come_back() -> None:
    """Goes on for ever, and comes back as docs/guide/failure.md says."""
    state: dict[str, int] = {"step": 0}
    members = 3
    while True:
        try:
            start(min_peers=members)
            members = 1
            while True:
                began = time.monotonic()
                state = pccl.sync(state)
                total, info = pccl.allreduce(x(1000), return_info=True)
                assert (total == expected(info)).all()
                state["step"] += 1
                took = time.monotonic() - began
                say(event="step", step=state["step"], size=info.world_size, took=took)
                threading.Event().wait(0.05)
        except pccl.PCCLError as error:
            if error.advice != "rejoin":
                raise
            say(event="out", error=type(error).__name__, step=state["step"])
            pccl.shutdown()


def reduce_or_say_why() -> None:
    try:
        start()
        began = time.monotonic()
        info = pccl.allreduce(x(), return_info=True)[1]
        say(event="alone", size=info.world_size, seconds=time.monotonic() - began)
    except pccl.PCCLError as error:
        say(event="error", name=type(error).__name__, reason=error.reason, advice=error.advice)
    hear()


def reduce_once(count: int) -> None:
    start()
    total, info = pccl.allreduce(x(count), return_info=True)
    assert (total == expected(info)).all() and info.world_size == 2
    pccl.shutdown()


def wait() -> None:
    start(min_peers=1)
    pccl.barrier()
    say(event="in")
    hear()


def reduce_or_sync() -> None:
    """Reduces, or makes its state the others', or ends its links. Answers say over how many."""
    comm = start()
    state: dict[str, Any] = {"w": np.full(300_000, pccl.rank(), np.float32), "step": 0}
    master = int(os.environ["PCCL_MASTER"].rpartition(":")[2])
    while (word := hear()) != "end":
        if word == "cut":
            for end in links(master):
                end.shutdown(socket.SHUT_RDWR)
            continue
        if word == "sync":
            state, synced = pccl.sync(state, return_info=True)
            say(event="synced", first=float(state["w"][0]), size=synced.world_size)
            continue
        total, info = pccl.allreduce(x(word), return_info=True)
        say(
            event="reduced",
            right=bool((total == expected(info)).all()),
            size=info.world_size,
            relayed=sorted(comm.topology().relayed),
        )
    pccl.shutdown()
