"""A peer of the drill: a training loop that does what the drill tells it, and says each step.

    python peer.py NAME STATE_BYTES

Input: one JSON word a line. "end": stop; "mismatch": call with another shape once; "elsewhere":
make another call once; "mute": make no call until "speak"; "save": write a checkpoint of 8 MiB.
Output: one JSON object a line.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import pccl

COMPUTE_SECONDS = 0.02  # of a step, in place of training


def say(**what: object) -> None:
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


def hear(orders: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put("end")


class Peer:
    """The loop, and what it was told."""

    def __init__(self, name: str, state_bytes: int) -> None:
        self._name = name
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._once = ""  # what the next step does instead of its call
        self._muted = False
        self._ended = False
        self._state: dict[str, Any] = {
            "step": 0,
            "weights": np.zeros(16_384, np.float64),
            "rest": np.zeros(state_bytes, np.uint8),
        }
        threading.Thread(target=hear, args=(self._orders,), daemon=True).start()

    def run(self) -> None:
        """Joins, and trains until it is told to end. An eviction makes it a newcomer."""
        while not self._ended:
            try:
                pccl.init(name=self._name)
                say(event="joined", pid=os.getpid())
                while not self._ended:
                    self._obey()
                    self._step()
            except pccl.PCCLError as error:
                say(event="error", kind=type(error).__name__, text=str(error))
                pccl.shutdown()
                if error.advice not in ("rejoin", "retry"):
                    raise
        pccl.shutdown()
        say(event="ended")

    def _obey(self) -> None:
        while self._muted or not self._orders.empty():
            order = self._orders.get()
            if order == "mute":
                self._muted = True
            elif order == "speak":
                self._muted = False
            elif order == "end":
                self._ended = True
                self._muted = False
            elif order == "save":
                self._save()
            else:
                self._once = order

    def _step(self) -> None:
        try:
            if pccl.admit():
                self._state = pccl.sync(self._state)
            time.sleep(COMPUTE_SECONDS)
            self._call()
        except (pccl.PeerLost, pccl.MismatchedCall, pccl.Deadlock) as error:
            say(event="error", kind=type(error).__name__, text=str(error))

    def _call(self) -> None:
        once, self._once = self._once, ""
        if once == "mismatch":
            pccl.allreduce(np.ones(3))
        elif once == "elsewhere":
            try:
                pccl.barrier()
            except pccl.Deadlock as error:
                say(event="error", kind=type(error).__name__, text=str(error))
                pccl.shutdown()  # the others are one call ahead of this peer: it begins again
                pccl.init(name=self._name)
                return
        step = self._state["step"]
        gradients = np.full_like(self._state["weights"], (step * 7919) % 1000)
        mean, info = pccl.allreduce(gradients, "avg", return_info=True)
        self._state["weights"] -= 0.001 * mean
        self._state["step"] = step + 1
        digest = hashlib.blake2b(self._state["weights"], digest_size=8).hexdigest()
        say(event="step", step=step + 1, world=info.world_size, digest=digest)

    def _save(self) -> None:
        """A checkpoint onto a disk that has no room for it."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        folder = Path(os.environ["DRILL_FOLDER"])
        try:
            pccl.checkpoint.save(
                folder / f"{self._name}.safetensors", {"w": np.zeros(1 << 20)}, revision=1
            )
            say(event="saved")
        except OSError as error:
            left = sorted(path.name for path in folder.iterdir())
            say(event="not saved", text=str(error), left=left)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


if __name__ == "__main__":
    Peer(sys.argv[1], int(sys.argv[2])).run()
