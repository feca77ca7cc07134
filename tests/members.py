"""Members of one run in this process. Each call is made on a thread of its own."""

from __future__ import annotations

import threading
import traceback
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
        join = {"min_peers": count, "attempts": 5, "timeout": 30.0, "enter": False}
        try:
            for told in in_threads([lambda c=comm: c._join("init", **join) for comm in comms]):
                if isinstance(told, BaseException):
                    raise told
            yield sorted(comms, key=lambda comm: pccl.rank(comm))
        finally:
            for comm in comms:
                comm.close()


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results, or exceptions, of calls that are each made in a thread of their own.

    Exceptions are printed, too: the members of the other calls may wait for the one that failed.
    """
    told: list[Any] = [None] * len(calls)

    def make(index: int) -> None:
        try:
            told[index] = calls[index]()
        except BaseException as error:  # also that of pytest.fail
            traceback.print_exc()
            told[index] = error

    threads = [threading.Thread(target=make, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def each(
    comms: list[pccl.Communicator], call: Callable[[int, pccl.Communicator], Any]
) -> list[Any]:
    """What `call(rank, comm)` returns on each member, or the PCCLError it raises.

    Raises: the first exception that is no PCCLError.
    """
    told = in_threads([lambda r=rank, c=comm: call(r, c) for rank, comm in enumerate(comms)])
    for result in told:
        if isinstance(result, BaseException) and not isinstance(result, pccl.PCCLError):
            raise result
    return told


def results(
    comms: list[pccl.Communicator], call: Callable[[int, pccl.Communicator], Any]
) -> list[Any]:
    """What `call(rank, comm)` returns on each member. Raises: the exception of one of them."""
    told = each(comms, call)
    for result in told:
        if isinstance(result, BaseException):
            raise result
    return told
