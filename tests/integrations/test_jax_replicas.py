"""jax.distributed inside a replica, pccl between replicas: one process is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from launches import LIMIT, example, losses

import pccl

jax = pytest.importorskip("jax")

REPLICAS = ["a", "b"]
SIZE = 2  # processes of a replica
STEPS, KILLED = 60, 30


def reference() -> float:
    """The loss when one process takes the steps of both replicas."""
    import jax.numpy as jnp

    def loss_of(weights: jax.Array, seed: int) -> jax.Array:
        x = jax.random.normal(jax.random.key(seed), (32, 8))
        return jnp.mean((x @ weights - x.sum(1)) ** 2)

    gradient = jax.jit(jax.grad(loss_of))
    weights = jnp.zeros(8)
    seeds = [1000 * (zlib.crc32(name.encode()) % 1000) for name in REPLICAS]
    for step in range(STEPS):
        weights -= 0.05 * sum(gradient(weights, seed + step) for seed in seeds) / len(seeds)
    return float(loss_of(weights, 1))


@contextmanager
def free_address() -> Iterator[str]:
    """An address for a coordinator. It is reserved: only a socket that reuses it can take it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def train(folder: Path, dies: bool, returns: bool = False) -> dict[str, tuple[int, str]]:
    """How each process ends, and what it prints. The last one of "b" may be killed.

    If "b" returns, "a" waits for it.
    """
    with ExitStack() as stack:
        master = stack.enter_context(pccl.MasterNode("127.0.0.1:0", min_peers=len(REPLICAS)))
        env = {"PCCL_MASTER": master.address, "PCCL_BIND": "127.0.0.1", "JAX_PLATFORMS": "cpu"}
        env["PYTHONPATH"] = str(Path(__file__).with_name("dies"))
        env["DIES_ONCE"] = str(folder / "died")

        def begin(name: str) -> dict[str, subprocess.Popen[bytes]]:
            address = stack.enter_context(free_address())
            started = {}
            for rank in range(SIZE):
                more = {"PCCL_LOCAL_RANK": str(rank)}
                if dies and name == "b":
                    more["DIES_AT"] = str(KILLED)
                if returns and name == "a":
                    more["WAITS_AT"] = str(KILLED + 2)  # after a step alone
                with (folder / f"{name}{rank}").open("wb") as out:
                    process = subprocess.Popen(
                        [
                            sys.executable,
                            example("jax_replicas"),
                            name,
                            address,
                            *map(str, (SIZE, rank)),
                        ],
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        cwd=folder,  # not the source tree, which has no extension
                        env={**os.environ, **env, **more},
                    )
                stack.callback(process.wait)
                stack.callback(process.kill)
                started[f"{name}{rank}"] = process
            return started

        first, second = map(begin, REPLICAS)
        if returns:
            codes = [process.wait(LIMIT) for process in second.values()]
            assert codes[-1] == -signal.SIGKILL and 0 not in codes
            second = begin("b")
        ended = {name: process.wait(LIMIT) for name, process in (first | second).items()}
    return {name: (code, (folder / name).read_text()) for name, code in ended.items()}


def test_sharded_replicas_have_the_loss_of_one_process(tmp_path: Path) -> None:
    for status, shown in train(tmp_path, dies=False).values():
        assert status == 0, shown
        assert losses(shown) == pytest.approx([reference()], rel=1e-3), shown


def test_a_replica_goes_on_when_a_process_of_another_one_is_killed(tmp_path: Path) -> None:
    ended = train(tmp_path, dies=True)
    assert ended["b1"][0] == -signal.SIGKILL
    assert ended["b0"][0] != 0 and losses(ended["b0"][1]) == []
    survivors = [ended[f"a{rank}"] for rank in range(SIZE)]
    assert [status for status, _ in survivors] == [0] * SIZE, survivors
    (first,), (second,) = (losses(shown) for _, shown in survivors)
    assert first == second < 1e-3, survivors
    assert all("; 1 member goes on" in shown for _, shown in survivors), survivors


def test_a_replica_that_is_started_again_receives_its_shards(tmp_path: Path) -> None:
    ended = train(tmp_path, dies=True, returns=True)
    assert [status for status, _ in ended.values()] == [0] * 4, ended
    assert "; 1 member goes on" in ended["a0"][1], ended
    shown = [losses(text) for _, text in ended.values()]
    assert shown == [shown[0]] * 4 and shown[0][0] < 1e-3, ended
