"""Peers with programs/c/faulty.c between them and the system."""

from __future__ import annotations

import os

import numpy as np

import pccl
from programs.peer import expected, say, start, x


def connect_once() -> None:
    comm = pccl.Communicator(os.environ["PCCL_MASTER"])
    try:
        comm.connect(1 if "," not in os.environ["PCCL_MASTER"] else 5)
        say(event="connected")
    except pccl.PCCLError as error:
        say(event="refused", error=type(error).__name__, reason=error.reason)


def join_until_interrupted() -> None:
    say(event="joins")
    try:
        start()
    except KeyboardInterrupt:
        say(event="interrupted")


def reduce_once() -> None:
    start()
    total, info = pccl.allreduce(x(), return_info=True)
    assert (total == expected(info)).all()
    say(event="reduced", size=info.world_size)
    pccl.shutdown()


def make_a_long_array() -> None:
    made = pccl.empty(40 << 20, np.uint8)
    made[-1] = 1
    say(event="made")
