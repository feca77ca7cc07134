"""Every loop in README, docs, docstrings and examples takes in a peer that starts late.

All end at the same step, with the same state, and nobody is left alone.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from forked import Forked

import pccl

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 240  # processes that import torch or JAX on a busy machine
FENCED = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^ {4,}\S.*\n|^\n)+", re.MULTILINE)
# A loop whose body meets other peers.
LOOP = re.compile(
    r"^( *)(?:for|while) .*:.*\n(?:(?:\1 +.*)?\n)*?\1 +.*"
    r"(?:pccl\.(?:sync|admit|allreduce)|sync_shared_state|diloco\.step|outer\.update)\(",
    re.MULTILINE,
)


def python_in(path: Path) -> list[str]:
    """The Python that a page shows, or a module's docstrings."""
    text = path.read_text()
    if path.suffix == ".md":
        return FENCED.findall(text)
    shown = re.findall(r'"""(.*?)"""', text, re.DOTALL)
    return [
        dedent(block) for string in shown for block in INDENTED.findall(cleandoc(string) + "\n")
    ]


def loops(path: Path) -> list[str]:
    """The programs shown there that meet other peers in a loop."""
    return [code for code in python_in(path) if LOOP.search(code)]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [
    path for folder in ("pccl", "adapters") for path in sorted((ROOT / folder).rglob("*.py"))
]
LOOPS = {
    f"{path.relative_to(ROOT)} {number}": code
    for path in (*PAGES, *MODULES)
    for number, code in enumerate(loops(path), 1)
}


@dataclass(frozen=True)
class Shown:
    """A program that is shown.

    Attributes:
        result: An expression in its names. All must have its value in the end.
        before: A module of programs/shown, whose names the part that is shown uses.
        needs: Modules.
        turn: The admission point at which the newcomer comes.
        last: The last one, if the test is to be made there, too.
        early: How many start with the run.
        instead: (text, what replaces it)
    """

    result: str
    before: str = ""
    needs: str = ""
    turn: int = 3
    last: int = 0
    early: int = 2
    instead: tuple[tuple[str, str], ...] = ()


JAX_ROUNDS = "params, state.core.outer_step"
ROUNDS = "[p.detach() for p in model.parameters()], diloco.outer_step"
AT_ONCE = (("time.sleep(0.5)", "pass"),)
FEWER_STEPS = (("sync_every=50", "sync_every=5"), ("sync_every=100", "sync_every=5"))

PROGRAMS = {
    "README.md 1": Shown("state", last=11, instead=(("== 1000", "== 10"),)),  # train.py
    "README.md 2": Shown(ROUNDS, needs="torch"),  # diloco.py
    "README.md 3": Shown("state", needs="jax"),  # jax_jit.py
    "docs/reference/overview.md 1": Shown("state", "numpy_loop", last=7),
    "docs/guide/checkpoints.md 1": Shown(
        "state",
        "numpy_loop",
        "safetensors",
        last=7,
        instead=(
            ('"sampler": sampler', '"sampler": sampler, "weights": weights'),
            ("min_peers=4", ""),
        ),
    ),
    "docs/guide/data.md 1": Shown("state", "numpy_loop", last=11),
    "docs/guide/data.md 2": Shown("state", needs="torch"),
    "docs/guide/data.md 3": Shown(
        "state",
        "torch_sampler",
        "torch",
    ),
    "docs/guide/failure.md 1": Shown("state", "numpy_loop", last=7),
    "docs/guide/fsdp.md 1": Shown(
        "[p.detach().to_local() for p in model.parameters()], diloco.outer_step",
        "torch_sharded",
        "torch",
        instead=(
            ("sync_every=10", "sync_every=5"),
            ('"gloo")', '"gloo", store=dist.HashStore(), rank=0, world_size=1)'),
        ),
    ),
    "docs/guide/first-run.md 1": Shown("state", last=61, instead=AT_ONCE),
    "docs/guide/from-hivemind.md 1": Shown("state", needs="torch"),
    "docs/guide/from-pypccl.md 1": Shown(
        "weights, state.revision", early=1, instead=(("WORLD_SIZE) < 2", "WORLD_SIZE) < 1"),)
    ),
    "docs/guide/from-pypccl.md 2": Shown("state"),
    "docs/guide/from-torch-ddp.md 1": Shown("state", needs="torch"),
    "docs/guide/from-torch-ddp.md 2": Shown("state", needs="torch"),
    "docs/guide/from-torchft.md 1": Shown("state", needs="torch"),
    "docs/guide/from-torchft.md 2": Shown(ROUNDS, needs="torch"),
    "docs/guide/jax.md 1": Shown("state", needs="jax"),
    "docs/guide/joining.md 1": Shown("state"),
    "docs/guide/joining.md 2": Shown("state", needs="safetensors"),
    "docs/guide/pytorch.md 1": Shown("state", needs="torch"),
    "docs/guide/spot-instances.md 1": Shown("state", needs="safetensors", instead=AT_ONCE),
    "docs/concepts/joining.md 1": Shown("state", "numpy_in_a_run", last=7),
    "docs/guide/shared-state.md 1": Shown("state", "numpy_loop", last=7),
    "docs/guide/shared-state.md 2": Shown(
        "weights, m, state.revision",
        "torch_explicit",
        "torch",
        last=6,
        early=1,  # one that founds the group alone, as in the explicit API the first one does
        instead=(
            ('"10.0.0.1:48148"', 'os.environ["PCCL_MASTER"]'),
            (
                "        comm.all_reduce(gradient, mean, op=ReduceOp.AVG)\n",
                "        if pccl.world_size(comm) > 1:\n"
                "            comm.all_reduce(gradient, mean, op=ReduceOp.AVG)\n",
            ),
        ),
    ),
    "docs/guide/shared-state.md 3": Shown(
        "state",
        "numpy_checkpoints",
        "safetensors",
        instead=(("min_peers=4", ""),),
    ),
    "docs/guide/diloco.md 1": Shown(ROUNDS, "torch_loop", "torch", instead=FEWER_STEPS),
    "docs/guide/diloco.md 2": Shown(
        ROUNDS,
        "torch_loop",
        "torch safetensors",
        instead=FEWER_STEPS,
    ),
    "docs/guide/diloco.md 3": Shown("w, state.core.outer_step", needs="jax", instead=FEWER_STEPS),
    "docs/guide/diloco.md 4": Shown("w, diloco.outer_step", "numpy_loop", instead=FEWER_STEPS),
    "pccl/training/data.py 1": Shown("state", "numpy_in_a_run"),
    "pccl/training/diloco/algorithm.py 1": Shown(
        "w, b, diloco.outer_step",
        "numpy_diloco",
        instead=FEWER_STEPS,
    ),
    "adapters/torch/diloco.py 1": Shown(
        ROUNDS,
        "torch_in_a_run",
        "torch",
        instead=FEWER_STEPS,
    ),
    "adapters/jax/_diloco.py 1": Shown(JAX_ROUNDS, "jax_loop", "jax", instead=FEWER_STEPS),
}


# Arguments, modules, and whether the first peer founds the run alone.
EXAMPLES: dict[str, tuple[str, str, int]] = {
    "explicit.py": ("", "numpy", 1),
    "jax_pmap.py": ("", "optax", 2),
    "jax_shard_map.py": ("", "jax", 2),
    "torch_diloco.py": ("--rounds 5", "torch sklearn", 2),
    "async_diloco.py": ("--rounds 5", "torch sklearn", 2),
    "jax_diloco.py": ("", "optax", 2),
    "byte_gpt.py": (
        "--width 32 --layers 1 --context 32 --sync-every 4 --test-examples 16 --tokens 8000",
        "torch safetensors",
        2,
    ),
}
# Run with peers that come late elsewhere, or of a world that is fixed by torch.distributed.
ELSEWHERE = {"digits.py", "fsdp_diloco.py", "kill_and_join.py", "torch_ddp.py"}
# These have no loop with collective calls.
WITHOUT = {"hello.py", "serve_text.py"}


def test_every_loop_that_is_shown_is_run() -> None:
    assert LOOPS.keys() == PROGRAMS.keys()
    names = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert names == EXAMPLES.keys() | ELSEWHERE | WITHOUT


class Peers:
    """Processes whose output is heard together, and that end with the test."""

    def __init__(
        self, folder: Path, program: Path, result: str, arguments: list[str], *, torch: bool
    ) -> None:
        self._folder = folder
        self._torch = torch
        self._rest = [result, str(program), *arguments]
        self._lines: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes] | Forked] = []
        self._threads: list[threading.Thread] = []
        self.heard: list[tuple[int, str]] = []

    def begin(self, role: str, turn: int, **env: str) -> None:
        script = str(ROOT / "tests" / "late.py")
        usual = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "STEPS": "8", "ROUNDS": "5"}
        command = [script, role, str(turn), *self._rest]
        given: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "cwd": self._folder,
            "env": {**os.environ, **usual, "PCCL_LOCAL_RANK": str(len(self._processes)), **env},
        }
        process: subprocess.Popen[bytes] | Forked
        if self._torch:
            process = Forked(command, **given)
        else:
            process = subprocess.Popen([sys.executable, *command], **given)
        thread = threading.Thread(target=self._read, args=(len(self._processes), process))
        thread.start()
        self._processes.append(process)
        self._threads.append(thread)

    def _read(self, number: int, process: subprocess.Popen[bytes] | Forked) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put((number, line.decode().rstrip()))
        self._lines.put((number, None))

    def hear(self, pattern: str, deadline: float) -> None:
        while True:
            number, line = self._next(deadline)
            assert line is not None, f"program {number} ended:\n{self.said()}"
            if re.search(pattern, line):
                return

    def ends(self, deadline: float) -> list[str]:
        """Returns the last line of each."""
        left = len(self._processes)
        while left:
            left -= self._next(deadline)[1] is None
        assert not any(process.wait() for process in self._processes), self.said()
        return [line for _, line in self.heard if line.startswith("ends with ") and "among" in line]

    def _next(self, deadline: float) -> tuple[int, str | None]:
        try:
            number, line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"no end in time:\n{self.said()}") from None
        if line is not None:
            self.heard.append((number, line))
        return number, line

    def said(self) -> str:
        return "\n".join(f"{number}: {line}" for number, line in self.heard[-60:])

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for thread in self._threads:
            thread.join()


def check(
    folder: Path,
    program: Path,
    result: str,
    arguments: list[str],
    *,
    needs: str,
    turn: int,
    early: int,
) -> None:
    """All end together and alike, though one comes at that admission point."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    peers = Peers(folder, program, result, arguments, torch="torch" in needs.split())
    with pccl.MasterNode("127.0.0.1:0") as master:
        try:
            for _ in range(early):
                peers.begin("early", turn, PCCL_MASTER=master.address, PCCL_MIN_PEERS=str(early))
            peers.hear("waits for a newcomer", deadline)
            peers.begin("late", 0, PCCL_MASTER=master.address, PCCL_MIN_PEERS="1")
            ends = peers.ends(deadline)
        finally:
            peers.stop()
    assert len(ends) == early + 1 and len(set(ends)) == 1, peers.said()
    assert re.search(rf" among ({early + 1}|alone)$", ends[0]), peers.said()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "turn"),
    [
        pytest.param(name, turn, id=f"{name} at {turn}")
        for name, shown in PROGRAMS.items()
        for turn in (shown.turn, shown.last)
        if turn
    ],
)
def test_a_late_peer_joins_what_is_shown_and_all_end_alike(
    name: str, turn: int, tmp_path: Path
) -> None:
    shown = PROGRAMS[name]
    for module in shown.needs.split():
        pytest.importorskip(module)
    before = f"from programs.shown.{shown.before} import *\n" if shown.before else ""
    code = before + LOOPS[name]
    for old, new in shown.instead:
        code = code.replace(old, new)
    program = tmp_path / "program.py"
    program.write_text(code)
    check(tmp_path, program, shown.result, [], needs=shown.needs, turn=turn, early=shown.early)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_late_peer_joins_an_example_and_all_end_alike(name: str, tmp_path: Path) -> None:
    arguments, needs, early = EXAMPLES[name]
    for module in needs.split():
        pytest.importorskip(module)
    example = ROOT / "examples" / name
    text = example.read_text()
    result = "weights" if re.search(r"^weights = ", text, re.MULTILINE) else "None"
    check(tmp_path, example, result, arguments.split(), needs=needs, turn=3, early=early)
