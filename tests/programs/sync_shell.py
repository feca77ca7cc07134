"""Peers that hold a shared state, and change and sync it as told (simple API)."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import pccl
from programs.peer import hear, peer_id, say, start, x
from programs.shell import obey

state: Any = None  # what this peer syncs
given: Any = None  # what it held before the last sync


def serve() -> None:
    join()
    obey()


def join() -> None:
    start()
    say(event="in", rank=pccl.rank(), peer=peer_id())


def rejoin() -> None:
    """Leaves, and joins in the same process."""
    pccl.shutdown()
    join()


def leave() -> None:
    pccl.shutdown()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# States.


class Keeper:
    """An object with a state dict. A broken one does not load."""

    def __init__(self, kept: Any, broken: bool = False) -> None:
        self.kept = kept
        self.broken = broken

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, kept: Any) -> None:
        if self.broken:
            raise RuntimeError("does not load")
        self.kept = kept


def noise(seed: int, count: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def full(shape: int | list[int], value: float, dtype: str) -> npt.NDArray[Any]:
    if dtype == "bfloat16":
        import ml_dtypes  # noqa: F401  # NumPy knows the name from here on
    return np.full(shape, value, dtype)


def shared(count: int, value: float) -> npt.NDArray[np.float64]:
    """In memory that other processes of the host can read."""
    array = pccl.empty(count, np.float64)
    array.fill(value)
    return array


MAKERS: dict[str, Callable[..., Any]] = {
    "noise": noise,
    "full": full,
    "shared": shared,
    "arange": np.arange,
    "keeper": lambda kept, broken=False: Keeper(build(kept), broken),
}


def build(spec: Any) -> Any:
    """A tree of what tests/syncs.py describes."""
    if isinstance(spec, dict):
        if "made" in spec:
            maker, *arguments = spec["made"]
            return MAKERS[maker](*arguments)
        return {key: build(child) for key, child in spec.items()}
    if isinstance(spec, list):
        return [build(child) for child in spec]
    return spec


def parts(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield repr(key).encode()
            yield from parts(tree[key])
    elif isinstance(tree, list | tuple):
        yield str(len(tree)).encode()
        for child in tree:
            yield from parts(child)
    elif hasattr(tree, "state_dict"):
        yield from parts(tree.state_dict())
    elif hasattr(tree, "__dataclass_fields__"):
        yield from parts(vars(tree))
    elif tree is None or type(tree) in (bool, int, float, str):
        yield repr(tree).encode()
    else:
        array = np.asarray(tree.detach() if hasattr(tree, "detach") else tree)
        yield f"{array.dtype.name}{array.shape}".encode()
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        yield np.ascontiguousarray(native).reshape(-1).view(np.uint8).data


def digest(tree: Any) -> str:
    """Equal for equal structure, types and elements, in any byte order and layout."""
    whole = hashlib.sha256()
    for part in parts(tree):
        whole.update(part)
    return whole.hexdigest()


# Syncs.


def failed(error: BaseException) -> None:
    what: dict[str, Any] = {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, pccl.PCCLError):
        what.update(result=error.result.name, peer=error.peer, advice=error.advice)
    if isinstance(error, pccl.Deadlock):
        what["waiting"] = list(error.waiting)
    say(event="failed", **what)


def sync_tree(tree: Any, until: int | str | None = None, **options: Any) -> Any:
    """Syncs until the group has that many members, or that one.

    Returns the state, and says what these syncs moved and did in all.
    """
    tx = rx = 0
    received: set[str] = set()
    diverged: dict[str, Any] = {}
    while True:
        try:
            tree, info = pccl.sync(tree, return_info=True, **options)
        except (pccl.PCCLError, KeyboardInterrupt) as error:
            failed(error)
            return tree
        tx, rx = tx + info.tx_bytes, rx + info.rx_bytes
        received.update(info.received)
        diverged.update(info.diverged)
        if until in (None, info.world_size, *info.peers):
            break
    assert (info.epoch, info.peers) == (pccl.membership().epoch, pccl.membership().peers)
    say(
        event="synced",
        digest=digest(tree),
        tx=tx,
        rx=rx,
        revision=info.revision,
        size=info.world_size,
        epoch=info.epoch,
        received=sorted(received),
        diverged=diverged,
        peers=info.peers,
    )
    return tree


def hold(spec: Any) -> None:
    """Takes a new state, and does not sync it yet."""
    global state
    state = build(spec)


def sync(*spec: Any, announce: bool = False, **options: Any) -> None:
    """Syncs the state that it holds, or a new one. `announce`: says "calling" before."""
    global state, given
    if spec:
        hold(*spec)
    if announce:
        say(event="calling")
    given = state
    state = sync_tree(state, **options)


def sync_object(tree: Any, **options: Any) -> None:
    """Takes a new state, made in this process, and syncs it."""
    global state
    state = tree
    sync(**options)


def sync_given(**options: Any) -> None:
    """Syncs what it had before its last sync."""
    global state
    state = given
    sync(**options)


def wait_until_unmapped() -> None:
    """Until large memory of other processes is not mapped here any more, for 20 s at most."""

    def mapped() -> int:
        lines = [line.split() for line in open("/proc/self/maps") if "memfd:pccl" in line]
        ends = [[int(end, 16) for end in line[0].split("-")] for line in lines if line[1] == "r--s"]
        return sum(end - begin for begin, end in ends if end - begin >= 64 << 20)

    until = time.monotonic() + 20
    while mapped() and time.monotonic() < until:
        time.sleep(0.02)
    say(mapped=mapped())


def reduce_in_place(key: str) -> None:
    """Sums an array of the state over all members."""
    pccl.allreduce(state[key], out=state[key])
    assert (state[key] == state[key][0]).all()
    say(**{"is": float(state[key][0])})


# Changes of the state. A path is a list of keys.


def at(path: list[Any]) -> tuple[Any, Any]:
    """Returns the container of that entry, and its key there."""
    holder = state
    for key in path[:-1]:
        holder = holder[key]
    return holder, path[-1]


def add(path: list[Any], amount: int) -> None:
    holder, key = at(path)
    holder[key] += amount


def flip(path: list[Any]) -> None:
    """One bit of an element of an array."""
    holder, key = at(path)
    holder[key] ^= 1


def put(path: list[Any], value: Any) -> None:
    holder, key = at(path)
    holder[key] = value


def remove(path: list[Any]) -> None:
    holder, key = at(path)
    del holder[key]


# Answers about the state.


def say_whether_equal(spec: Any) -> None:
    say(same=digest(state) == digest(build(spec)))


def say_whether_given(*path: Any) -> None:
    """Whether the state, or an entry of it, is the object that was given to the last sync."""
    now, before = state, given
    for key in path:
        now, before = now[key], before[key]
    say(same=now is before)


def say_whether_all(value: int) -> None:
    """Whether all elements of the state, an array, are that."""
    say(same=bool((state == value).all()))


def say_digest() -> None:
    say(digest=digest(state))


def say_value(*path: Any) -> None:
    value = state
    for key in path:
        value = value[key]
    say(value=value.item() if hasattr(value, "item") else value)


# Other calls.


def admit() -> None:
    assert pccl.admit()


def admit_until_some() -> None:
    while not pccl.admit():
        pass


def reduce(times: int = 1) -> None:
    """Takes part in that many operations, without a word."""
    for _ in range(times):
        pccl.allreduce(1)


def reduce_and_admit() -> None:
    say(total=pccl.allreduce(1), let_in=pccl.admit())


def reduce_or_fail() -> None:
    try:
        pccl.allreduce(x(10))
        say(event="reduced")
    except pccl.PCCLError as error:
        failed(error)


def meet_until_alone() -> None:
    while pccl.world_size() > 1:
        pccl.barrier()


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def forget_ml_dtypes() -> None:
    """As where it is not installed."""
    sys.modules["ml_dtypes"] = None  # type: ignore[assignment]


def limit_memory(more: int) -> None:
    """At most so many bytes more than now."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + more,) * 2)


def interrupt_on_signal() -> None:
    """SIGUSR1 is as Ctrl-C, in a moment that the test chooses: when it tells something."""

    def interrupt(*_: object) -> None:
        say(event="interrupted")
        hear()
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, interrupt)
