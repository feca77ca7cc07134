"""Calls without a tag meet by the order of one thread's calls: a second thread is refused."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from members import each, in_threads, members
from workers import eventually

import pccl

Comm = pccl.Communicator


class Thread:
    """A thread that lives until the end of the block, and makes calls for it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Thread:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def call(self, make: Callable[[], Any]) -> Any:
        return self._pool.submit(make).result()


def simple(comm: Comm) -> object:
    return pccl.allreduce(np.ones(3), comm=comm)


def simple_tree(comm: Comm) -> object:
    return pccl.allreduce({"a": 1.0}, comm=comm)


def asynchronous(comm: Comm) -> object:
    return pccl.allreduce_async(np.ones(3), comm=comm).wait()


def gathered(comm: Comm) -> object:
    return pccl.allgather(np.ones(3), comm=comm)


def explicit(comm: Comm) -> object:
    return comm.all_reduce(np.ones(3), np.ones(3), op="sum")


def explicit_async(comm: Comm) -> object:
    return comm.all_reduce_async(np.ones(3), np.ones(3), op="sum")


def explicit_half(comm: Comm) -> object:
    return comm.broadcast(np.ones(3))


SIMPLE = [simple, simple_tree, asynchronous, gathered]
EXPLICIT = [explicit, explicit_async, explicit_half]


@pytest.mark.parametrize("call", SIMPLE + EXPLICIT)
def test_a_second_thread_is_told_to_use_a_tag(call: Callable[[Comm], object]) -> None:
    first = simple if call in SIMPLE else explicit
    with members(2) as comms, Thread() as owner, Thread() as other:
        peer = threading.Thread(target=first, args=(comms[1],))
        peer.start()
        owner.call(lambda: first(comms[0]))
        peer.join()
        with pytest.raises(pccl.InvalidUsage, match="tag"):
            other.call(lambda: call(comms[0]))
        # Nothing was started: the owner's next call meets the other member's.
        peer = threading.Thread(target=first, args=(comms[1],))
        peer.start()
        owner.call(lambda: first(comms[0]))
        peer.join()


def test_a_tag_is_the_cure() -> None:
    with members(2) as comms, Thread() as a, Thread() as b:

        def run(rank: int, comm: Comm) -> list[float]:
            made = []
            for step in range(20):
                for tag, thread in enumerate((a, b)):
                    x = np.full(2, 100.0 * tag + step)

                    def call(x: Any = x, tag: int = tag) -> Any:
                        return pccl.allreduce(x, tag=tag, comm=comm)

                    made.append(thread.call(call)[0] if rank == 0 else call()[0])
            return made

        wanted = [2 * (100.0 * tag + step) for step in range(20) for tag in (0, 1)]
        assert each(comms, run) == [wanted, wanted]


def test_of_two_threads_that_call_freely_one_is_refused() -> None:
    with members(2) as comms:
        go, over = threading.Barrier(4), threading.Barrier(4)

        def calls(comm: pccl.Communicator) -> str:
            go.wait()
            try:
                for _ in range(100):
                    simple(comm)
                return "done"
            except pccl.InvalidUsage:
                return "refused"
            finally:
                over.wait()  # neither hands over by its end

        told = in_threads([partial(calls, comm) for comm in comms for _ in range(2)])
        assert sorted(told[:2]) == sorted(told[2:]) == ["done", "refused"]


def test_a_thread_that_has_ended_has_handed_over() -> None:
    with members(1) as (comm,):
        for call in [simple, simple_tree] * 100:
            thread = threading.Thread(target=call, args=(comm,))
            thread.start()
            thread.join()
        simple(comm)


def test_a_new_thread_with_the_number_of_one_that_has_ended_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread's number is the address of its stack, which a new thread may get.

    Here the owner ends during the check.
    """
    with members(1) as (comm,), Thread() as owner:
        owner.call(lambda: simple(comm))
        number, native = owner.call(threading.get_ident), owner.call(threading.get_native_id)
        looked_for = []

        def frames() -> dict[int, None]:
            owner.__exit__()
            eventually(lambda: not os.path.exists(f"/proc/self/task/{native}"))
            looked_for.append(number)
            return {number: None}

        monkeypatch.setattr(sys, "_current_frames", frames)
        simple(comm)
        assert looked_for == [number]


def test_a_thread_that_has_ended_leaves_its_calls_in_flight() -> None:
    with members(2) as comms:
        works: list[Any] = []

        def start() -> None:
            works.append(pccl.allreduce_async(np.full(2, 1.0), comm=comms[0]))

        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        works.append(pccl.allreduce_async(np.full(2, 2.0), comm=comms[0]))

        def run(rank: int, comm: Comm) -> list[float]:
            if rank == 0:
                return [work.wait()[0] for work in works]
            return [pccl.allreduce(np.full(2, x), comm=comm)[0] for x in (1.0, 2.0)]

        assert each(comms, run) == [[2.0, 4.0]] * 2


class InTurn(ThreadPoolExecutor):
    """Runs each call on another thread than the one before."""

    def __init__(self) -> None:
        super().__init__(1)
        self._pools = itertools.cycle([ThreadPoolExecutor(1) for _ in range(3)])

    def submit(self, *args: Any, **named: Any) -> Any:
        return next(self._pools).submit(*args, **named)


def test_threads_of_a_pool_are_refused_without_a_tag() -> None:
    """Tasks that take turns by chance would pair their calls in another order on each member."""
    with members(2) as comms:
        comm = comms[0]

        async def program() -> list[Any]:
            await asyncio.gather(*(pccl.allreduce_async(np.ones(1), comm=c) for c in comms))
            other = asyncio.to_thread(pccl.allreduce, np.ones(1), comm=comm)
            told = await asyncio.gather(other, return_exceptions=True)
            tagged = (asyncio.to_thread(pccl.allreduce, np.ones(1), tag=7, comm=c) for c in comms)
            return [*told, *[float(mean[0]) for mean in await asyncio.gather(*tagged)]]

        told, *sums = asyncio.run(program())
        assert isinstance(told, pccl.InvalidUsage) and "tag=" in str(told)
        assert sums == [2.0, 2.0]


def test_tasks_await_calls_of_the_event_loops_thread() -> None:
    with members(2) as comms:

        async def program(comm: Comm) -> list[float]:
            return [
                float((await pccl.allreduce_async(np.ones(1), comm=comm))[0]) for _ in range(12)
            ]

        assert each(comms, lambda rank, comm: asyncio.run(program(comm))) == [[2.0] * 12] * 2


def test_rounds_may_come_from_any_thread() -> None:
    with members(2) as comms, Thread() as other:
        each(comms, lambda rank, comm: simple(comm))

        def run(rank: int, comm: Comm) -> object:
            def calls() -> object:
                pccl.barrier(comm=comm)
                return pccl.sync({"a": np.ones(2)}, comm=comm)["a"].tolist()

            return other.call(calls) if rank == 0 else calls()

        assert each(comms, run) == [[1.0, 1.0]] * 2
