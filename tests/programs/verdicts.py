"""Members that make the calls they are told, in time or late."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import pccl
from programs.peer import hear, say, start


def make(call: str, given: npt.NDArray[Any]) -> Any:
    world = pccl.world_size()
    calls: dict[str, Callable[[], Any]] = {
        "allgather": lambda: pccl.allgather(given),
        "into": lambda: pccl.allgather(given, out=np.zeros((world, *given.shape), np.int64)),
        "broadcast": lambda: pccl.broadcast(given),
        "from the last": lambda: pccl.broadcast(given, world - 1),
        "reduce_scatter": lambda: pccl.reduce_scatter(given, "avg"),
        "alltoall": lambda: pccl.alltoall(given),
        "allreduce": lambda: pccl.allreduce(given, "max"),
        "barrier": pccl.barrier,
        "admit": pccl.admit,
        "begin": lambda: pccl.allreduce_async(given, "max"),
        "admit soon": lambda: pccl.admit(timeout=0.3),
        "sync soon": lambda: pccl.sync({"step": np.zeros(3)}, timeout=0.3),
        "sync": lambda: pccl.sync({"step": np.zeros(3)})["step"],
    }
    return calls[call]()


def make_calls() -> None:
    """Makes the calls it is told.

    Each carries the number of the caller's step, so that a call that meets another step's is seen
    in its result.
    """
    pccl.init()
    pccl.barrier()
    say(event="in", rank=pccl.rank(), peer=pccl.membership().peers[pccl.rank()])
    for line in sys.stdin:
        call, step = json.loads(line)
        given = np.full((4 * pccl.world_size(), 2), step, np.int64)
        try:
            made = make(call, given)
            steps = np.unique(made).tolist() if isinstance(made, np.ndarray) else []
            how: dict[str, Any] = {"event": "done", "steps": steps}
        except pccl.PeerLost as error:
            how = {"event": "lost", "lost": error.peer}
        except pccl.Timeout:
            how = {"event": "timeout"}
        except KeyboardInterrupt:
            how = {"event": "interrupted"}
        say(**how, epoch=pccl.membership().epoch, members=pccl.world_size())
    pccl.shutdown()


def found() -> None:
    start(min_peers=3)
    before = pccl.membership()
    say(event="in", epoch=before.epoch, members=before.world_size)
    hear()
    try:
        pccl.reduce_scatter(np.ones((3, 4)))
    except pccl.PeerLost as error:
        say(event="lost", peer=error.peer, members=pccl.world_size())
    say(event="gathered", parts=len(pccl.allgather(np.ones(1))))
    hear()
