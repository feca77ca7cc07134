"""Collectives other than all-reduce, among members that are killed."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

import pccl
from programs.peer import say, say_when_calling


def call_among_losses() -> None:
    """Makes each call that it is told, [which, whether to say when it is in it], until "stop"."""
    comm = pccl.init(min_peers=3)
    shared = os.environ["PCCL_SHM"] == "1"
    # Members of one host find each other's memory in an epoch of its own.
    while pccl.allreduce(1, return_info=True)[1].epoch < 2 and shared:
        pass
    say(event="in", rank=pccl.rank())
    for line in sys.stdin:
        told = json.loads(line)
        if told == "stop":
            break
        x = np.full(200_000, pccl.rank() + 1.0)
        order, says = told
        sent = (
            np.tile(x, (pccl.world_size(), 1)) if order.startswith(("scatter", "exchange")) else x
        )
        before = sent.copy()
        if says:
            say_when_calling(comm)
        made: Any
        try:
            if order == "broadcast":
                made = pccl.broadcast(x, 1, out=x)  # in place
            elif order == "from the first":
                made = pccl.broadcast(x)
            elif order == "allgather":
                made = pccl.allgather(x)
            elif order == "later":
                made = pccl.allgather_async(x).wait()
            elif order == "into":
                made = pccl.allgather(x, out=np.zeros((pccl.world_size(), x.size)))
            elif order == "exchange":
                made = pccl.alltoall(sent)
            elif order == "exchange in place":
                made = pccl.alltoall(sent, out=sent)
            elif order == "scatter into the input":
                rank = pccl.rank()
                made = pccl.reduce_scatter(sent, out=sent[rank : rank + 1])
            else:
                made = pccl.reduce_scatter(sent)
            say(event="done", values=np.unique(made).tolist(), shape=list(made.shape))
        except pccl.PeerLost:
            assert (sent == before).all()
            say(event="lost")
    pccl.shutdown()
