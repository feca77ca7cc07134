"""Peers with JAX and four CPU devices each, which call one function after the other."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from programs import jax_jit, jax_peer
from workers import Program, Run, Worker, running

DEVICES = 4
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
}

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")


class Peers:
    """The peers of one run."""

    def __init__(self, run: Run, count: int, **env: str) -> None:
        self.run = run
        self.workers = run.peers(count, jax_peer.serve, **{**ENVIRONMENT, **env})
        for worker in self.workers:
            worker.expect("ready", 60)

    def tell(self, *programs: Program) -> None:
        """One function for all, or one for each."""
        each = programs if len(programs) > 1 else programs * len(self.workers)
        for worker, program in zip(self.workers, each, strict=True):
            worker.call(program)

    def answers(self, timeout: float = 30) -> list[Any]:
        return [answer(worker, timeout) for worker in self.workers]

    def both(self, *programs: Program) -> list[Any]:
        """Calls the function on all peers. An assert that fails there fails this test."""
        self.tell(*programs)
        return self.answers()


def answer(worker: Worker, timeout: float = 30) -> Any:
    told = worker.next(timeout)
    assert told["event"] == "answer", f"{told['answer']}\n{worker.stderr()}"
    return told["answer"]


def lose_one(peers: Peers, program: Program) -> tuple[int, list[Any]]:
    """Kills a member while the others are in `program`: its rank, and what they answer."""
    victim = peers.workers.pop(0)
    victim.call(jax_jit.reduce_once)
    peers.tell(program)
    gone = answer(victim)
    for worker in peers.workers:
        worker.expect("calling")
    victim.signal(signal.SIGKILL)
    return int(gone), peers.answers()


@contextmanager
def jax_peers(count: int = 2, **env: str) -> Iterator[Peers]:
    with running() as run:
        yield Peers(run, count, **env)
