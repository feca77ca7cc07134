"""Other packages' own code over pccl: the loss is Gloo's, and a killed rank does not end the run.

`make test-integrations` runs these with the packages of requirements-integrations.txt.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from launches import ROOT, RUNNER, example, losses, members, run

TORCHRUN = ["lightning_ddp", "fabric_ddp", "accelerate_ddp", "transformers_ddp"]
DDP = [*TORCHRUN, "ray_train"]
DILOCO = ["lightning_diloco", "transformers_diloco"]
Losses = Callable[[str], list[float]]  # of an example

# An optimizer step in the middle, after the first checkpoint.
MIDDLE = {
    "lightning_ddp": "13",
    "fabric_ddp": "13",
    "accelerate_ddp": "13",
    "transformers_ddp": "17",
    "ray_train": "17",
    "lightning_diloco": "55",
    "transformers_diloco": "35",
}


def train(name: str, backend: str, folder: Path, **env: str) -> list[float]:
    """The loss that each of the two ranks has at its end; with Ray that of the first."""
    launcher = []
    if name in TORCHRUN:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    program = [str(RUNNER), example(name), backend, str(folder / "checkpoints")]
    output = run([*launcher, *program], folder, **env)
    found = losses(output)
    assert len(found) == (2 if name in TORCHRUN else 1), output
    return found


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of an example with Gloo."""
    return cache(lambda name: train(name, "gloo", tmp_path_factory.mktemp("gloo")))


@pytest.mark.parametrize("name", DDP)
def test_ddp_has_the_loss_that_it_has_with_gloo(name: str, gloo: Losses, tmp_path: Path) -> None:
    assert train(name, "pccl", tmp_path) == gloo(name)


@pytest.mark.parametrize("name", DDP)
def test_ddp_goes_on_from_its_checkpoint_after_a_kill(
    name: str, gloo: Losses, tmp_path: Path
) -> None:
    found = train(name, "pccl", tmp_path, DIES_AT=MIDDLE[name])
    assert found == pytest.approx(gloo(name), rel=1e-5)


@pytest.mark.parametrize("name", DILOCO)
def test_members_of_a_diloco_run_end_with_the_same_weights(name: str, tmp_path: Path) -> None:
    output = members(example(name), folder=tmp_path)
    weights = re.findall(r"^\[\d\] loss \S+ weights (\S+)$", output, re.MULTILINE)
    assert len(weights) == 2 and len(set(weights)) == 1, output
    assert max(losses(output)) < 1, output


@pytest.mark.parametrize("name", DILOCO)
def test_a_diloco_run_goes_on_when_a_member_is_killed(name: str, tmp_path: Path) -> None:
    output = members(example(name), folder=tmp_path, DIES_AT=MIDDLE[name])
    assert "rank 1 was ended by SIGKILL; 1 of 2 go on" in output
    assert len(losses(output)) == 1 and losses(output)[0] < 1, output


def test_adapters_are_short() -> None:
    for name in ("lightning.py", "ray/__init__.py", "ray/run.py", "transformers.py"):
        assert len((ROOT / "adapters" / name).read_text().splitlines()) < 200
