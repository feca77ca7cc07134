"""The JAX examples are as good as one process, equal bit for bit, and survive churn."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from jaxpeers import needs_jax

import pccl

pytestmark = needs_jax

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
NAMES = ["jax_shard_map.py", "jax_pmap.py"]
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


def launch(folder: Path, ranks: int, script: Path, *args: str) -> str:
    command = [sys.executable, "-m", "pccl", "run", "-n", str(ranks), "--"]
    done = subprocess.run(
        [*command, sys.executable, str(script), *args],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def needed_by(name: str) -> None:
    if "optax" in (EXAMPLES / name).read_text():
        pytest.importorskip("optax", reason="needs optax")


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_learn_what_one_learns_and_agree_bit_for_bit(
    tmp_path: Path, name: str
) -> None:
    needed_by(name)
    weights = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        shown = launch(folder, ranks, EXAMPLES / name, str(folder))
        assert len(set(re.findall(r"ends with weights ([0-9a-f]{8})", shown))) == 1, shown
        losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", shown)]
        assert len(losses) == 40 * ranks and losses[-1] < 0.6 * losses[0], shown
        weights[ranks] = [np.load(file) for file in folder.glob("weights-*.npz")]
    (alone,), (first, second) = weights[1], weights[2]
    for key in alone.files:
        assert first[key].tobytes() == second[key].tobytes()
        np.testing.assert_allclose(first[key], alone[key], rtol=1e-3, atol=1e-4)
        assert first[key].tobytes() != alone[key].tobytes()  # they did share the work


class Trainer:
    """One process of an example."""

    def __init__(self, master: str, name: str, peers: int) -> None:
        env = {**ENVIRONMENT, "PCCL_MASTER": master, "PCCL_MIN_PEERS": str(peers)}
        self.process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / name)],
            env={**env, "STEPS": "1000000"},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.steps: dict[int, tuple[str, int]] = {}  # loss as shown, processes

    def until(self, processes: int) -> int:
        """Reads on to the first step of that many processes, and returns its number."""
        out: IO[str] | None = self.process.stdout
        assert out is not None
        for line in out:
            found = re.match(r"step (\d+): loss ([\d.]+), (\d+) processes", line)
            if found:
                self.steps[int(found[1])] = found[2], int(found[3])
                if int(found[3]) == processes:
                    return int(found[1])
        raise AssertionError(f"ended: {self.process.wait()}")


@contextmanager
def trainers() -> Iterator[list[Trainer]]:
    made: list[Trainer] = []
    try:
        yield made
    finally:
        for trainer in made:
            trainer.process.kill()
            trainer.process.wait()
            assert trainer.process.stdout is not None
            trainer.process.stdout.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_process_is_killed_the_other_goes_on_and_a_new_one_comes_in(name: str) -> None:
    needed_by(name)
    with pccl.MasterNode("127.0.0.1:0") as master, trainers() as running:
        first, second = Trainer(master.address, name, 2), Trainer(master.address, name, 2)
        running += [first, second]
        assert first.until(2) == 1
        second.process.send_signal(signal.SIGKILL)
        alone = first.until(1)
        newcomer = Trainer(master.address, name, 1)
        running.append(newcomer)
        joined = first.until(2)
        assert joined > alone
        # It goes on with the step and the weights that the first has.
        assert newcomer.until(2) == joined
        assert newcomer.steps[joined] == first.steps[joined]


def test_the_readmes_program_ends_with_the_same_weights_on_all(tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```python\n(# jax_jit.*?)^```",
        (ROOT / "README.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    (tmp_path / "jax_jit.py").write_text(blocks[0])
    lines = launch(tmp_path, 2, tmp_path / "jax_jit.py").splitlines()
    ends = [line.split("] ", 1)[1] for line in lines]
    assert len(ends) == 2 and ends[0] == ends[1] and ends[0].startswith("["), lines
