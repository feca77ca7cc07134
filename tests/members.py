"""Members of one run in this process. Each call is made on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pccl

# Makes so many members, in rank order. Keywords are those of `members`.
Members = Callable[..., list[pccl.Communicator]]


@contextmanager
def members(
    count: int, *, secret: str | None = None, listen: str = "127.0.0.1:0"
) -> Iterator[list[pccl.Communicator]]:
    """`count` members, in rank order."""
    with pccl.MasterNode(listen, secret=secret) as master:
        comms = [pccl.Communicator(master.address, secret=secret) for _ in range(count)]
        joining = [
            threading.Thread(
                target=comm._join,
                args=("init",),
                kwargs={"min_peers": count, "attempts": 5, "timeout": 30.0, "enter": False},
            )
            for comm in comms
        ]
        for thread in joining:
            thread.start()
        for thread in joining:
            thread.join()
        try:
            yield sorted(comms, key=lambda comm: pccl.rank(comm))
        finally:
            for comm in comms:
                comm.close()


def each(
    comms: list[pccl.Communicator], call: Callable[[int, pccl.Communicator], Any]
) -> list[Any]:
    """What `call(rank, comm)` returns on each member, or the PCCLError it raises."""
    told: list[Any] = [None] * len(comms)

    def run(rank: int) -> None:
        try:
            told[rank] = call(rank, comms[rank])
        except pccl.PCCLError as error:
            told[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(comms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told
