"""Peers that are asked to leave their run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import pccl
from programs.peer import say, start


def told() -> Iterator[object]:
    """The words of the test, up to "end"."""
    for line in sys.stdin:
        word = json.loads(line)
        if word == "end":
            return
        yield word


def train() -> None:
    """One step each time it is told to; one more call is in flight at the admission point."""
    state: dict[str, Any] = {"step": 0, "weights": np.zeros(1000)}
    start()
    say(event="ready")
    try:
        for word in told():
            if word == "drain":
                pccl.drain()
                continue
            work = pccl.allreduce_async(np.ones(100_000), tag=1) if state["step"] else None
            if pccl.admit():
                state = pccl.sync(state)
            world = pccl.allreduce(1)
            state["weights"] += world
            state["step"] += 1
            flying = int(work.wait()[0]) if work else world
            say(event="step", world=world, flying=flying, weights=state["weights"][0])
    except pccl.Drained as error:
        say(event="drained", text=str(error), code=error.code, open=pccl.is_initialized())
        raise
    pccl.shutdown()
    say(event="done")


def share_always() -> None:
    """Every step is a sync."""
    state = {"step": 0}
    start()
    say(event="ready")
    for _ in told():
        state = pccl.sync(state)
        state["step"] += 1
        say(event="step", step=state["step"])
    pccl.shutdown()
    say(event="done")


def train_and_come_back() -> None:
    """One step each time it is told to. Joins again when it was put out."""
    start()
    say(event="ready")
    try:
        for word in told():
            if word == "drain":
                pccl.drain()
                continue
            try:
                say(event="step", world=pccl.allreduce(1))
            except pccl.PCCLError as error:
                assert error.advice == "rejoin", error
                pccl.shutdown()
                pccl.init()
                say(event="back")
            pccl.admit()
    except pccl.Drained:
        say(event="drained")
        raise


def join_again_and_wait() -> None:
    """Leaves after SIGTERM, joins again and comes to no admission point."""
    start()
    say(event="ready")
    next(told())
    pccl.shutdown()
    wait_without_end()


def train_in_rounds(mode: str, *, rejoin: bool = False) -> None:
    """DiLoCo, one round each time it is told to."""
    w = np.zeros(4, np.float32)
    start()
    made_again = pccl.init if rejoin else None
    diloco = pccl.diloco.DiLoCo({"w": w}, sync_every=2, mode=mode, rejoin=made_again)
    say(event="ready")
    try:
        for word in told():
            if word == "drain":
                pccl.drain()
                continue
            ended = False
            while not ended:
                w += 1
                ended = diloco.step()
            info = diloco.info
            say(event="round", world=info.world_size if info else 0, round=diloco.outer_step)
    except pccl.Drained:
        say(event="drained", round=diloco.outer_step)
        raise
    say(event="done")


def wait_without_end() -> None:
    """Has no admission point."""
    start()
    say(event="ready")
    while True:
        time.sleep(60)


def reduce_without_end() -> None:
    start()
    pccl.admit()
    world = 0
    say(event="ready")
    while True:
        now = pccl.allreduce(1)
        if now != world:
            world = now
            say(event="world", world=world)


def have_a_handler() -> None:
    signal.signal(signal.SIGTERM, lambda *_: say(event="own"))
    start()
    say(event="ready")
    signal.pause()
    pccl.shutdown()
    say(event="done")


def shut_down_and_wait() -> None:
    start()
    pccl.shutdown()
    say(event="ready", usual=signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    signal.pause()


def close_and_wait() -> None:
    comm = start()
    comm.close()
    say(event="ready")
    signal.pause()


def fork_and_wait() -> None:
    """A child that was forked, as a data loader's are, ends at SIGTERM."""
    start()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"x")
        while True:  # not signal.pause(): the signal may come just before it
            time.sleep(0.01)
    os.read(reading, 1)  # Python drops signals that a child gets before it is set up
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    say(event="ended", by=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None)
    pccl.shutdown()
