"""Peers for the benchmarks: processes that obey orders from standard input, and what both sides
need for that."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

PATIENCE = 120.0  # seconds for any answer


class Peer:
    """A process that runs `script --peer`, as its parent sees it; `prefix` is what starts it
    elsewhere."""

    def __init__(
        self,
        script: str,
        arguments: Sequence[str],
        environment: dict[str, str],
        prefix: Sequence[str] = (),
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, script, "--peer", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PCCL_BIND": "127.0.0.1",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                **environment,
            },
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def tell(self, order: str, **what: Any) -> None:
        """Gives an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"order": order, **what}).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, event: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """The next thing it says, which must be that."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise SystemExit(f"a peer did not say {event!r} in {timeout:.0f} s") from None
        if not line:
            raise SystemExit(f"a peer ended instead of saying {event!r}, see above")
        answer: dict[str, Any] = json.loads(line)
        if answer["event"] != event:
            raise SystemExit(f"a peer said {answer} instead of {event!r}")
        return answer

    def heard(self) -> list[dict[str, Any]]:
        """All that it has said, and nobody has heard yet."""
        said = []
        while not self._lines.empty():
            if line := self._lines.get():
                said.append(json.loads(line))
        return said

    def signal(self, number: signal.Signals) -> float:
        """Sends a signal; returns when, by the clock of `time.monotonic`, which all processes
        share."""
        now = time.monotonic()
        self.process.send_signal(number)
        return now

    def end(self) -> None:
        """Kills it, in whatever state it is."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def ask(peers: Sequence[Peer], order: str, answer: str, **what: Any) -> list[dict[str, Any]]:
    """The same order to all, and what each answers."""
    for peer in peers:
        peer.tell(order, **what)
    return [peer.hear(answer) for peer in peers]


def say(event: str, **what: Any) -> None:
    """In a peer: tells the parent."""
    print(json.dumps({"event": event, **what}), flush=True)


def digest_of(array: np.ndarray[Any, Any]) -> str:
    """The SHA-256 of its bytes, for members that must hold the same."""
    return hashlib.sha256(np.ascontiguousarray(array)).hexdigest()


def next_order() -> dict[str, Any]:
    """In a peer: the parent's next order; ends the process when there is no parent any more."""
    line = sys.stdin.readline()
    if not line:
        os._exit(1)
    order: dict[str, Any] = json.loads(line)
    return order
