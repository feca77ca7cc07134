"""Two peers with JAX and four CPU devices each, that run one piece of code after the other."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from workers import Run, Worker, running

DEVICES = 4
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
}

# A piece of code is told by a line; it finds `rank`, and puts what the test is to know into `answer`.
LOOP = """
import jax, jax.numpy as jnp, traceback
from jax.sharding import NamedSharding, PartitionSpec as P
import pccl.adapters.jax

comm = start()
rank = comm._engine.membership()[1]
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
say(event="ready")

def address(array):
    return array.unsafe_buffer_pointer()

def same(array, expected):
    np.testing.assert_array_equal(np.asarray(array), np.asarray(expected))
    return True

def raised(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind}")

for line in sys.stdin:
    names = dict(globals(), answer=None)
    try:
        exec(compile(json.loads(line), "<test>", "exec"), names)
        say(event="answer", answer=names["answer"])
    except BaseException:
        say(event="failed", answer=traceback.format_exc())
"""

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")


class Peers:
    """The peers of one run."""

    def __init__(self, run: Run, count: int, **env: str) -> None:
        self.run = run
        self.workers = run.peers(count, LOOP, **{**ENVIRONMENT, **env})
        for worker in self.workers:
            worker.expect("ready", 60)

    def tell(self, *codes: str) -> None:
        """One piece of code for all, or one for each."""
        each = codes if len(codes) > 1 else codes * len(self.workers)
        for worker, code in zip(self.workers, each, strict=True):
            worker.tell(textwrap.dedent(code))

    def answers(self, timeout: float = 30) -> list[Any]:
        return [answer(worker, timeout) for worker in self.workers]

    def both(self, *codes: str) -> list[Any]:
        """Runs the code on all peers; what its asserts say is this test's failure."""
        self.tell(*codes)
        return self.answers()


def answer(worker: Worker, timeout: float = 30) -> Any:
    told = worker.next(timeout)
    assert told["event"] == "answer", f"{told['answer']}\n{worker.stderr()}"
    return told["answer"]


@contextmanager
def jax_peers(count: int = 2, **env: str) -> Iterator[Peers]:
    with running() as run:
        yield Peers(run, count, **env)
