"""FSDP2 inside a replica, pccl between replicas: one process is killed and its replica returns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from launches import LIMIT, RUNNER, example, losses

import pccl

torch = pytest.importorskip("torch")

REPLICAS = ["a", "b"]
SIZE = 2  # processes of a replica
STEPS, KILLED = 60, 30
DIES = str(Path(__file__).with_name("dies"))


def reference() -> float:
    """The loss when one process takes the steps of both replicas."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(1)
    x = torch.randn(512, 8)
    y = x.sum(1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    adam = torch.optim.AdamW(model.parameters(), 0.03)
    get_state_dict(model, adam)  # makes the moments by a step at rate 0, which Adam counts
    for step in range(STEPS):
        batch = slice(first := 128 * step % 512, first + 128)
        adam.zero_grad()
        torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        adam.step()
    loss: float = torch.nn.functional.mse_loss(model(x), y).item()
    return loss


def train(folder: Path, more: dict[str, dict[str, str]]) -> dict[str, str]:
    """Returns the output of each replica. `more`: settings of one replica."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    torchrun += [f"--nproc-per-node={SIZE}", str(RUNNER)]
    with ExitStack() as stack:
        master = stack.enter_context(pccl.MasterNode("127.0.0.1:0", min_peers=len(REPLICAS)))
        env = {"PCCL_MASTER": master.address, "PCCL_BIND": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        # Without this, torchrun restarts ranks with the store that the killed ones have filled.
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        started = {}
        for name in REPLICAS:
            with (folder / name).open("wb") as out:
                process = subprocess.Popen(
                    [*torchrun, example("fsdp_replicas"), name],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd=folder,  # not the source tree, which has no extension
                    env={**os.environ, **env, **more.get(name, {})},
                )
            stack.callback(process.wait)
            stack.callback(process.terminate)  # ends its ranks, too
            started[name] = process
        codes = {name: process.wait(LIMIT) for name, process in started.items()}
    shown = {name: (folder / name).read_text() for name in REPLICAS}
    assert set(codes.values()) == {0}, shown
    return shown


def test_sharded_replicas_have_the_loss_of_one_process(tmp_path: Path) -> None:
    for shown in train(tmp_path, {}).values():
        assert losses(shown) == pytest.approx([reference()] * SIZE, rel=1e-3), shown


def test_a_replica_that_lost_a_process_comes_back_with_its_shards(tmp_path: Path) -> None:
    died = tmp_path / "died"
    dies = {"DIES_AT": str(KILLED), "DIES_ONCE": str(died)}
    # Both ranks of the other replica have made a step alone before they wait.
    waits = {"PYTHONPATH": DIES, "WAITS_AT": str(KILLED + 2)}
    ended = train(tmp_path, {"a": waits, "b": dies})
    assert died.exists() and "; 1 member goes on" in ended["a"], ended
    (first,) = {loss for shown in ended.values() for loss in losses(shown)}
    assert [len(losses(shown)) for shown in ended.values()] == [SIZE, SIZE]
    # As with all examples of both replicas, but for those of one or two steps.
    assert first == pytest.approx(reference(), rel=0.2), ended
    assert re.search(r"exitcode: -9\) local_rank: 1", ended["b"]), ended["b"]
