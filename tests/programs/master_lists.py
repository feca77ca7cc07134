"""Peers and masters of a run whose masters are given as a list."""

from __future__ import annotations

import os

import numpy as np

import pccl
from programs import capi
from programs.peer import hear, say, start


def use_the_explicit_api(number: int) -> None:
    """Connects to the list; then reduces 2 ** `number` whenever it is told a number of members."""
    comm = pccl.Communicator(os.environ["PCCL_MASTER"])
    comm.connect()
    mine, out = np.full(1000, 2.0**number), np.zeros(1000)
    while members := int(hear()):
        while comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE) < members:
            comm.update_topology()
        info = comm.all_reduce(mine, out, op=pccl.ReduceOp.SUM)
        assert np.all(out == out[0])
        say(event="sum", size=info.world_size, sum=out[0])
    comm.close()


def use_c(number: int, address: str) -> None:
    """The same through pccl.h, whose struct has `address`: one of those in PCCL_MASTER."""
    peer = capi.Peer(address)
    mine, out = np.full(1000, 2.0**number), np.zeros(1000)
    while members := int(hear()):
        peer.gather(members)
        info = peer.reduce(mine, out)
        assert np.all(out == out[0])
        say(event="sum", size=info.local_world_size, sum=out[0])
    peer.destroy()


def fail_in_c(address: str) -> None:
    """Says why it cannot connect to `address`."""
    try:
        capi.Peer(address)
    except capi.Failed as error:
        say(event="failed", result=error.result, text=error.sentence)


def train(**options: object) -> None:
    """Is a member, and admits and reduces whenever it is told to."""
    start(**options)
    say(event="in")
    try:
        while hear():
            pccl.admit()
            total, info = pccl.allreduce(np.ones(1000), return_info=True)
            assert np.all(total == info.world_size)
            say(event="step", size=info.world_size)
    except pccl.PCCLError as error:
        say(event="out", kind=type(error).__name__, text=str(error))
