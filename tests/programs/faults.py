"""Peers that are killed, frozen, interrupted or late, and those that work beside them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

import pccl
from pccl import _threads, errors, result_pool
from programs.peer import (
    expected,
    float_sum,
    hear,
    peer_id,
    say,
    say_when_calling,
    start,
    value,
    x,
)


def loop(count: int) -> None:
    """Reduces and admits newcomers until told to stop. Checks each result by its contributors."""
    start()
    say(event="in", peer=peer_id())
    stop = threading.Event()

    def listen() -> None:
        hear()
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    steps = reruns = 0
    while True:
        pccl.admit()
        mine = x(count)
        total: Any
        total, info = pccl.allreduce({"x": mine, "stop": int(stop.is_set())}, return_info=True)
        assert (total["x"] == expected(info)).all(), "wrong sum"
        assert (mine == value(peer_id())).all(), "input was written"
        inplace = x(count // 2)
        _, again = pccl.allreduce(inplace, out=inplace, return_info=True)
        assert (inplace == expected(again)).all(), "wrong sum in place"
        steps += 1
        reruns += (info.attempts > 1) + (again.attempts > 1)
        if steps == 1:
            say(event="reducing", size=info.world_size)
        if total["stop"]:
            break
    say(event="done", steps=steps, size=info.world_size, reruns=reruns)
    hear()


def lose_the_master() -> None:
    """Reduces until the master is gone, and says how long that took."""
    start()
    say(event="in")
    hear()
    began = time.monotonic()
    try:
        while True:
            pccl.allreduce(x(1000))
    except pccl.MasterLost as error:
        say(event="lost", seconds=time.monotonic() - began, result=error.result.name)
    try:
        pccl.barrier()
    except pccl.MasterLost:
        say(event="again")


def connect_of_explicit() -> pccl.Communicator:
    """A communicator of the explicit API that has joined."""
    comm = pccl.Communicator(os.environ["PCCL_MASTER"])
    comm.connect()
    return comm


def gather(comm: pccl.Communicator, members: int) -> None:
    """Lets newcomers in until there are that many members."""
    while comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE) < members:
        comm.update_topology()


def lose_a_peer_of_explicit() -> None:
    """Enters a reduction of three, one of which is told to die, and reduces again without it."""
    comm = connect_of_explicit()
    gather(comm, 3)
    say(event="in")
    order = hear()
    mine = np.arange(300_000, dtype=np.float32)
    kept = mine.copy()
    if order == "reduce":
        handle = comm.all_reduce_async(mine, mine, op=pccl.ReduceOp.SUM)
    # Rounds with the master, behind which it knows that the operation was entered.
    for _ in range(300):
        comm.are_peers_pending()
    say(event="entered")
    if order == "die":
        signal.pause()
    done, status, _ = handle.wait()
    error = handle.exception()
    say(
        event="lost",
        done=done,
        result=pccl.Result(status).name,
        intact=bool((mine == kept).all()),
        kind=type(error).__name__,
    )
    comm.update_topology()
    info = comm.all_reduce(mine, mine, op=pccl.ReduceOp.SUM)
    say(event="after", ok=bool((mine == 2 * kept).all()), size=info.local_world_size)
    hear()


# Calls that block. Each says "calling" just before.


def _call_alone_in_init() -> None:
    say(event="calling")
    pccl.init(min_peers=9)


def _call_connect() -> None:
    comm = pccl.Communicator(os.environ["PCCL_MASTER"])
    say(event="calling")
    comm.connect()


def _call_unreachable() -> None:
    comm = pccl.Communicator("127.0.0.1:1")
    say(event="calling")
    comm.connect(n_attempts=99)


def _call_master() -> None:
    master = pccl.MasterNode("127.0.0.1:0")
    master.run()
    say(event="calling")
    master.wait()


def _join() -> pccl.Communicator:
    comm = start(min_peers=2)
    say(event="in")
    hear()
    return comm


def _call_allreduce() -> None:
    _join()
    say(event="calling")
    pccl.allreduce(x(10))


def _call_wait() -> None:
    _join()
    work = pccl.allreduce_async(x(10))
    say(event="calling")
    work.wait()


def _call_await() -> None:
    _join()
    work = pccl.allreduce_async(x(10))
    say(event="calling")
    asyncio.run(asyncio.wait_for(work, None))


def _call_barrier() -> None:
    _join()
    say(event="calling")
    pccl.barrier()


def _call_admit() -> None:
    _join()
    pccl.admit()
    say(event="calling")
    pccl.admit()


def _call_update_topology() -> None:
    comm = _join()
    comm.update_topology()
    say(event="calling")
    comm.update_topology()


def _call_are_peers_pending() -> None:
    comm = _join()
    say(event="calling")
    comm.are_peers_pending()


ALONE: dict[str, Callable[[], None]] = {
    "init": _call_alone_in_init,
    "connect": _call_connect,
    "unreachable": _call_unreachable,
    "master": _call_master,
}
WITH_A_PARTNER: dict[str, Callable[[], None]] = {
    "allreduce": _call_allreduce,
    "wait": _call_wait,
    "await": _call_await,
    "barrier": _call_barrier,
    "admit": _call_admit,
    "update_topology": _call_update_topology,
    "are_peers_pending": _call_are_peers_pending,
}


def block_in(call: str) -> None:
    """Makes that call, and says whether it returned or was interrupted."""
    try:
        (ALONE | WITH_A_PARTNER)[call]()
        say(event="result")
    except KeyboardInterrupt:
        say(event="interrupted")


def idle_of_explicit() -> None:
    """Joins alone, and makes no call."""
    comm = connect_of_explicit()
    say(event="in")
    hear()
    comm.close()


def reduce_with_a_straggler() -> None:
    """Waits in a reduction of three until the straggler is evicted."""
    start(min_peers=3)
    say(event="in")
    hear()
    total, info = pccl.allreduce(x(10), return_info=True)
    assert (total == expected(info)).all()
    say(event="reduced", size=info.world_size)
    hear()


def straggle() -> None:
    """Is evicted because it enters too late, and joins again."""
    start(min_peers=3)
    say(event="in")
    hear()
    try:
        pccl.allreduce(x(10))
    except pccl.Evicted as error:
        say(event="evicted", text=str(error), advice=error.advice)
    pccl.shutdown()
    start()
    say(event="in again")


def end_with_daemon_threads_in(call: str) -> None:
    """Ends while daemon threads of it wait in calls."""
    start(min_peers=2)
    say(event="in")
    hear()
    calls: list[Callable[[], object]] = [pccl.barrier]
    if call == "allreduce":
        calls = [partial(pccl.allreduce, x(10), tag=tag) for tag in range(7)]

    def make(call: Callable[[], object]) -> None:
        # At the end of Python the calls fail, and a thread that prints then ends the process.
        with suppress(pccl.PCCLError):
            call()

    for each in calls:
        threading.Thread(target=make, args=(each,), daemon=True).start()
    say(event="end")


def end_with_a_daemon_thread_in_python_code(where: str) -> None:
    """Ends while a daemon thread of it runs Python code that the engine has called.

    Before Python 3.14 that thread ends at the next bytecode, in the middle of C++ functions.
    """
    entered = threading.Event()

    def run_for_ever(*_: object) -> Any:
        entered.set()
        while True:
            pass

    stay: Any = run_for_ever  # takes the place of any function

    def stay_beside_main(function: Callable[..., Any]) -> Callable[..., Any]:
        def either(*given: Any) -> Any:
            main = threading.current_thread() is threading.main_thread()
            return function(*given) if main else stay()

        return either

    large = np.ones(result_pool.POOLED // 8)
    if where == "the memory of a result":
        result_pool.empty = stay
    elif where in ("the end of a result", "the end of a result that was refused"):
        result_pool._Pool.give_back = stay  # type: ignore[method-assign]
    elif where == "the number of a thread":
        _threads.current = stay_beside_main(_threads.current)
    elif where == "an error":
        errors.from_engine = stay
    start(min_peers=2)
    say(event="in")
    hear()
    # The other member never calls, so this ends with an error.
    call: Callable[[], object] = partial(pccl.allreduce, large, timeout=0.01)
    if where == "the end of a result that was refused":
        mine = pccl.allreduce_async(x(10))  # now calls without a tag are those of this thread
        call = partial(pccl.allreduce_async, large)
        assert not mine.done()
    threading.Thread(target=call, daemon=True).start()
    assert entered.wait(10)
    say(event="end")


def interrupt_the_multi_call() -> None:
    """Told "call": is interrupted in the multi call. Else: makes the same operations later."""
    comm = connect_of_explicit()
    gather(comm, 2)
    say(event="in")
    order = hear()
    send, outs = np.ones(1000, np.float32), [np.zeros(1000, np.float32) for _ in range(4)]

    if order == "call":
        descriptors = [
            pccl.ReduceOpDescriptor.from_numpy(send, out, float_sum(tag))
            for tag, out in enumerate(outs)
        ]
        say_when_calling(comm, len(outs))
        try:
            comm.all_reduce_multiple_with_retry(descriptors, max_in_flight=4)
        except KeyboardInterrupt:
            say(event="interrupted")
    ended = []
    for tag in range(4):
        if order == "call":
            hear()
        else:
            handle = comm.all_reduce_async(send, outs[tag], op=pccl.ReduceOp.SUM, tag=tag)
            ended.append(handle.wait()[0])
    say(event="done", ended=ended, untouched=all(bool((out == 0).all()) for out in outs))
    hear()


def reduce_or_fail_then_reduce() -> None:
    """Told "first": says when it calls. Says how its call failed, then reduces again."""
    comm = start(min_peers=2)
    say(event="in")
    if hear() == "first":
        say_when_calling(comm)
    try:
        pccl.allreduce(x(10))
        say(event="result")
    except (KeyboardInterrupt, pccl.PeerLost) as error:
        say(event="failed", kind=type(error).__name__)
    total, info = pccl.allreduce(x(10), return_info=True)
    say(event="after", ok=bool((total == expected(info)).all()), size=info.world_size)
    hear()


def leave_or_reduce() -> None:
    """Told "leave": shuts down. Told otherwise: reduces with those that stay."""
    start()
    pccl.allreduce(x(10))
    say(event="in", size=pccl.world_size())
    if hear() == "leave":
        pccl.shutdown()
        say(event="left")
    else:
        total, info = pccl.allreduce(x(10), return_info=True)
        say(event="after", ok=bool((total == expected(info)).all()), size=info.world_size)
        hear()


def reduce_once() -> None:
    """Reduces once, and says whether the sum is right."""
    start()
    total, info = pccl.allreduce(x(10), return_info=True)
    say(event="done", size=info.world_size, ok=bool((total == expected(info)).all()))
