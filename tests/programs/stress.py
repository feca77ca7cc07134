"""A peer of tests/stress.py: a training loop that checks everything it is told."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import pccl
from programs.peer import engine

PERIOD = 97
LARGEST = 200_000
WEIGHTS = 150_000
NUMBERS = 1000
DTYPES = ("int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64")
COMBINE = {"sum": np.add, "min": np.minimum, "max": np.maximum}

# Inputs are slices of these: every peer knows any sum of up to 20 of them, and it is exact.
PATTERNS = {
    name: (np.arange(LARGEST + PERIOD) % PERIOD).astype(name)  # at most 96 * 8 in int8: wraps
    for name in DTYPES
}


@dataclass(frozen=True)
class Operation:
    """One reduction of a step; the same on all members."""

    tag: int
    op: str
    dtype: str
    count: int

    def input_of(self, peer: str, step: int) -> npt.NDArray[Any]:
        """The input of the peer with that id."""
        first = (int(peer[:8], 16) + 7 * step + 13 * self.tag) % PERIOD
        given: npt.NDArray[Any] = PATTERNS[self.dtype][first : first + self.count]
        return given

    def result_of(self, peers: tuple[str, ...], step: int) -> npt.NDArray[Any]:
        """The result of these contributors' inputs."""
        result: npt.NDArray[Any] = self.input_of(peers[0], step).copy()
        for peer in peers[1:]:
            COMBINE[self.op](result, self.input_of(peer, step), out=result)
        return result


def operations(step: int) -> list[Operation]:
    """The reductions of a step, from one element to hundreds of thousands."""
    rng = random.Random(step)
    return [
        Operation(
            tag,
            rng.choice(sorted(COMBINE)),
            rng.choice(DTYPES),
            int(10 ** rng.uniform(0, 4)) if tag > 1 else rng.randrange(1, LARGEST),
        )
        for tag in range(rng.randrange(6, 14))
    ]


def first_state(rng: np.random.Generator, whole: bool) -> dict[str, Any]:
    """The state of a new peer; no two are equal. Not `whole`: without momentum."""
    state = {
        "weights": rng.standard_normal(WEIGHTS, np.float32),
        "layers": [
            rng.standard_normal(20_000),
            rng.integers(0, 1 << 40, NUMBERS),
            rng.standard_normal(777).astype(np.float16),
            rng.integers(0, 2, (3, 5)).astype(bool),
        ],
        "label": f"a {rng.integers(1 << 30)}",
        "step": 0,
    }
    if whole:
        state["momentum"] = {"weights": rng.standard_normal(WEIGHTS, np.float32)}
    return state


def parts(tree: Any) -> Iterator[bytes | memoryview]:
    """All bytes of a state, with what tells its structures apart."""
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield repr(key).encode()
            yield from parts(tree[key])
    elif isinstance(tree, list):
        yield str(len(tree)).encode()
        for child in tree:
            yield from parts(child)
    elif isinstance(tree, np.ndarray):
        yield f"{tree.dtype.str}{tree.shape}".encode()
        yield np.ascontiguousarray(tree).data.cast("B")
    else:
        yield repr(tree).encode()


def digest(tree: Any) -> str:
    """SHA-256 of a state."""
    whole = hashlib.sha256()
    for part in parts(tree):
        whole.update(part)
    return whole.hexdigest()


class WrongError(Exception):
    """The library broke a promise; found by a peer."""


class Peer:
    """The training loop, in a process of its own."""

    def __init__(self, seed: int, whole: bool) -> None:
        self.order = random.Random(seed)  # what differs from peer to peer
        self.noise = np.random.default_rng(seed)
        self.state = first_state(self.noise, whole)
        self.told = ""  # leave, stop
        self.id = ""
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        """Takes the parent's orders; ends with it."""
        for line in sys.stdin:
            self.told = json.loads(line)
        os._exit(1)

    def say(self, event: str, **what: Any) -> None:
        print(json.dumps({"event": event, "at": time.monotonic(), **what}), flush=True)

    def run(self) -> None:
        """One life after another, until told to end."""
        while True:
            try:
                comm = pccl.init()
                self.id = engine(comm).peer_id()  # a newcomer is in no membership yet
                self.live()
                pccl.shutdown()
                self.say("done", digest=digest(self.state), step=self.state["step"], why=self.told)
                return
            except (pccl.Evicted, pccl.Unreachable, pccl.MasterLost, pccl.Refused) as error:
                self.say("out", kind=type(error).__name__, text=str(error), advice=error.advice)
                pccl.shutdown()

    def live(self) -> None:
        """From joining to leaving."""
        self.say("in", peer=self.id)
        standing, reruns, checked = False, 0, 0
        while True:
            before = digest(self.state)
            self.state, info = pccl.sync(self.state, return_info=True)
            self.say(
                "sync",
                peer=self.id,
                standing=standing,
                before=before,
                digest=digest(self.state),
                step=self.state["step"],
                revision=info.revision,
                epoch=info.epoch,
                peers=info.peers,
                received=info.received,
                rx=info.rx_bytes,
                diverged={peer: list(names) for peer, names in info.diverged.items()},
                reruns=reruns,
                checked=checked,
            )
            if self.told == "leave":
                return
            reruns, checked, stop = self.step(info.peers)
            standing = True
            if stop:
                self.state = pccl.sync(self.state)
                return

    def step(self, members: tuple[str, ...]) -> tuple[int, int, bool]:
        """Reduces, checks, and changes the state.

        Returns re-runs, results checked, and whether to stop.
        """
        step: int = self.state["step"]
        wanted = operations(step)
        started = self.order.sample(wanted, len(wanted))
        works = {}
        for operation in started:
            mine = operation.input_of(self.id, step)
            out = None
            if operation.tag % 3 == 0:  # in place
                out = mine = mine.copy()
            works[operation] = pccl.allreduce_async(mine, operation.op, out=out, tag=operation.tag)
        gradient = self.noise.standard_normal(WEIGHTS, np.float32)
        mean = pccl.allreduce_async({"weights": gradient}, "avg", tag=1 << 40)
        flags: Any
        flags, told = pccl.allreduce(
            {"stop": int(self.told == "stop"), "one": np.ones(3, np.int16)}, return_info=True
        )
        if (flags["one"] != len(told.contributors)).any():
            raise WrongError(f"step {step}: {flags} of {told}")

        numbers = self.state["layers"][1]
        infos = [told]
        for operation in self.order.sample(wanted, len(wanted)):
            result, info = works[operation].wait(), works[operation].info
            if not {self.id} <= set(info.contributors) <= set(members):
                raise WrongError(f"step {step}: {operation} is of {info}, among {members}")
            if not np.array_equal(result, operation.result_of(info.contributors, step)):
                raise WrongError(f"step {step}: wrong result of {operation}, {info}")
            numbers[(step * 16 + operation.tag) % NUMBERS] = zlib.crc32(result)
            infos.append(info)
        average = mean.wait()["weights"]
        infos.append(mean.info)
        if "momentum" not in self.state:
            raise WrongError(f"step {step}: sync gave no momentum")
        momentum = self.state["momentum"]["weights"]
        momentum *= np.float32(0.9)
        momentum += average
        self.state["weights"] -= np.float32(0.01) * momentum
        self.state["layers"][0][step % 20_000] += float(average[0])
        self.state["step"] = step + 1
        reruns = sum(info.attempts > 1 for info in infos)
        return reruns, len(infos), bool(flags["stop"])


def be_peer(seed: int, whole: bool) -> None:
    """Trains until it is told to end."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    Peer(seed, whole).run()
