"""Syncs of misfits, and syncs in which a peer is lost or interrupted."""

from __future__ import annotations

import mmap
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import pccl
from programs import sync_shell as shell
from programs.peer import expected, say, x

BIG = 64 << 20  # elements of 8 bytes

# Entries that share memory.

_w = np.arange(8.0)
SHARING: dict[str, Any] = {
    "apart": {"a": _w.copy(), "b": _w.copy()},
    "tied": {"a": _w, "b": _w},
    "tied views": {"a": _w[::2], "b": _w[::2]},
    "overlapping": {"a": _w[:5], "b": _w[4:]},
    "reversed": {"a": _w, "b": _w[::-1]},
    "reshaped": {"a": _w.reshape(2, 4), "b": _w.reshape(4, 2)},
    "interleaved": {"a": _w[::2], "b": _w[1::2]},
    "beside a read-only view": {"a": _w, "b": np.frombuffer(_w.data.toreadonly())},
}


def sync_sharing(form: str) -> None:
    shell.sync_object(SHARING[form])


def fill_shared(value: float) -> None:
    _w[:] = value


# Calls that are refused, or fail.

_loop: list[Any] = []
_loop.append(_loop)
_no_function: Any = 3
BAD: dict[str, Callable[[], object]] = {
    "an object": lambda: pccl.sync({"a": [np.zeros(3), object()]}),
    "an array of objects": lambda: pccl.sync({"a": np.array([object()])}),
    "a structured array": lambda: pccl.sync({"a": np.zeros(3, [("x", "f4")])}),
    "a negative revision": lambda: pccl.sync(np.zeros(3), revision=-1),
    "progress that is no function": lambda: pccl.sync(np.zeros(3), progress=_no_function),
    "a negative timeout": lambda: pccl.sync(np.zeros(3), timeout=-1),
    "a list in itself": lambda: pccl.sync(_loop),
}


def sync_badly(name: str) -> None:
    try:
        BAD[name]()
    except pccl.PCCLError as error:
        shell.failed(error)


def sync_without_a_run() -> None:
    try:
        pccl.sync(np.zeros(3))
    except pccl.NotInitialized as error:
        say(event="failed", result=error.result.name)


def load(broken: bool) -> None:
    """Syncs a state with an object, which does not load if it is broken."""
    given = shell.state
    given["k"].broken = broken
    try:
        pccl.sync(given)
        say(event="loaded")
    except RuntimeError as error:
        say(event="broken", text=str(error))


def mend() -> None:
    shell.state["k"].broken = False


_before = ""


def remember() -> None:
    global _before
    _before = shell.digest(shell.state)


def say_whether_as_remembered() -> None:
    say(same=shell.digest(shell.state) == _before)


_kept: list[Any] = []


def change_half_and_freeze(path: list[Any]) -> None:
    """Changes two of the array's five MiB, and makes it read-only."""
    holder, key = shell.at(path)
    array = holder[key]
    array[: 2 << 20] += 1
    array.flags.writeable = False
    _kept[:] = [array, array.copy()]


def say_whether_replaced(path: list[Any]) -> None:
    """Whether the frozen array is as it was, and the state has a new one."""
    holder, key = shell.at(path)
    array, copy = _kept
    say(kept=bool((array == copy).all()), new=holder[key] is not array)


# Strikes: once, in the middle of a transfer.

_mine: Any = None


def hold_ones() -> None:
    """512 MiB that differ from everybody else's."""
    global _mine
    _mine = shell.state = np.ones(BIG, np.int64)


def sync_and_strike(
    number: int, pid: int | None = None, freeze: bool = False, **options: Any
) -> None:
    """Syncs ones, and sends that signal to a process, or itself. `freeze`: stops itself, then."""
    hold_ones()
    struck = False

    def progress(done: int, wanted: int) -> None:
        nonlocal struck
        if 0 < done < wanted and not struck:
            struck = True
            if pid is None:
                signal.raise_signal(number)
            else:
                os.kill(pid, number)
            if freeze:
                os.kill(os.getpid(), signal.SIGSTOP)

    shell.sync(progress=progress, **options)


class Counted(shell.Keeper):
    """Counts how often it was loaded."""

    loads = 0

    def load_state_dict(self, kept: Any) -> None:
        super().load_state_dict(kept)
        self.loads += 1


def sync_object_and_strike(number: int) -> None:
    """Overwrites an object's array, and then a large one, in which it strikes itself."""
    global _mine
    _mine = Counted({"w": np.ones(1000)})
    shell.state = {"a": _mine, "z": np.ones(BIG, np.int64)}
    struck = False

    def progress(done: int, wanted: int) -> None:
        nonlocal struck
        if 8000 < done < wanted and not struck:
            struck = True
            signal.raise_signal(number)

    shell.sync(progress=progress, overwrite=True)


def say_loads() -> None:
    say(loads=_mine.loads)


def sync_and_strike_at_the_end(seed: int) -> None:
    """So small a state is reported only once: when it is here."""
    global _mine
    _mine = {"n": 0, "w": shell.noise(seed, 1000)}
    shell.sync_object(_mine, progress=lambda *_: signal.raise_signal(signal.SIGINT))


def say_whether_mine_is(spec: Any) -> None:
    """Whether what was given to the sync that was struck has become that, in place."""
    say(same=shell.digest(_mine["w"]) == shell.digest(shell.build(spec)))


_calls: list[tuple[int, int]] = []


def sync_and_report() -> None:
    _calls.clear()
    shell.sync(progress=lambda done, wanted: _calls.append((done, wanted)))


def say_calls() -> None:
    say(calls=_calls)


def huge() -> Any:
    """6 GiB, whose hash takes a while. All pieces of it are the same page of memory."""
    file = tempfile.TemporaryFile()
    file.truncate(6 << 30)
    return np.frombuffer(mmap.mmap(file.fileno(), 6 << 30, prot=mmap.PROT_READ), np.uint8)


def sync_huge(timeout: float) -> None:
    try:
        pccl.sync(huge(), timeout=timeout)
    except pccl.Timeout as error:
        shell.failed(error)


def sync_huge_and_interrupt(seconds: float) -> None:
    big = huge()
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    shell.sync_tree(big)


# A training loop.


def train_until_four(fill: int, step: int) -> None:
    """Syncs and reduces until the group has four members, and says what came out."""
    state: dict[str, Any] = {"w": np.full(1000, fill, np.int64), "step": step}
    works: list[Any] = []
    ok = True
    while True:
        state, info = pccl.sync(state, return_info=True)  # first completes what is in flight
        for work in works:
            ok = ok and bool((work.wait() == expected(work.info)).all())
        total, reduced = pccl.allreduce(x(1000), return_info=True)
        ok = ok and bool((total == expected(reduced)).all())
        ok = ok and reduced.contributors == info.peers
        state["w"] += total
        state["step"] += 1
        if info.world_size == 4:
            break
        works = [pccl.allreduce_async(x(70_000), tag=tag) for tag in range(3)]
        works.append(pccl.allreduce_async(x(10)))
    shell.sync_object(state)
    say(event="after", ok=ok, step=shell.state["step"])


def found_with_own_numbers() -> None:
    """Syncs a state that names this peer and its rank."""
    from programs.peer import peer_id, value

    me = value(peer_id())
    layers = [np.full(3, pccl.rank(), np.int16), None]
    shell.sync_object({"w": np.full(1000, me), "n": float(me), "layers": layers})


def say_what_was_found() -> None:
    state, given = shell.state, shell.given
    say(w=int(state["w"][0]), n=state["n"], same=state["w"] is given["w"], all=state is given)
