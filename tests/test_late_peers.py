"""Every program with a loop in README, docs, docstrings and examples takes in a peer that starts late.

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

import pytest

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
    """What is shown there that meets other peers in a loop."""
    return [code for code in python_in(path) if LOOP.search(code)]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
        result: What all must have in the end, an expression in its names.
        before: What a program has before the part that is shown.
        needs: Modules.
        turn: The admission point at which the newcomer comes.
        last: The last one, if the test is to be made there, too.
        early: How many start with the run.
        instead: What the test puts in the place of other text.
    """

    result: str
    before: str = ""
    needs: str = ""
    turn: int = 3
    last: int = 0
    early: int = 2
    instead: tuple[tuple[str, str], ...] = ()


NUMPY = """
import itertools
import numpy as np
import pccl
steps, rounds = 6, 4
weights, momentum = np.zeros(5), np.zeros(5)
def batch():
    return np.ones(5)
def gradients(state, batch=None):
    return {"weights": np.full(5, 1.0 + pccl.rank())}
def update(state, mean):
    state["weights"] -= 0.1 * mean["weights"]
def train_one_step(state):
    update(state, pccl.allreduce(gradients(state), "avg"))
"""
TORCH = """
import torch
import pccl
torch.set_num_threads(1)
rounds = 4
model = torch.nn.Linear(3, 1)
inner = torch.optim.SGD(model.parameters(), 0.05)
batches = iter(lambda: torch.randn(8, 3), None)
def loss_of(model, batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()
"""
IN_A_RUN = "pccl.init()\n"
JAX = """
import jax, jax.numpy as jnp, pccl
import pccl.adapters.jax
pccl.init()
rounds, params, moments, batches = 4, {"w": jnp.zeros(3)}, None, iter(lambda: jnp.ones(3), None)
def train_step(params, moments, batch):
    return {"w": params["w"] + 0.1 * batch}, moments
"""
JAX_ROUNDS = "params, state.core.outer_step"
ROUNDS = "[p.detach() for p in model.parameters()], diloco.outer_step"
FEWER_STEPS = (("sync_every=50", "sync_every=5"), ("sync_every=100", "sync_every=5"))

PROGRAMS = {
    "README.md 1": Shown("state", last=101),  # train.py
    "README.md 2": Shown("state", needs="torch"),  # torch_train.py
    "README.md 3": Shown(ROUNDS, needs="torch"),  # diloco.py
    "README.md 4": Shown("state", needs="jax"),  # jax_train.py
    "README.md 5": Shown("state", needs="jax"),  # jax_jit.py
    "docs/api.md 1": Shown(
        "state", NUMPY + 'state = {"weights": weights, "step": 0}', last=7
    ),
    "docs/checkpoints.md 1": Shown(
        "state",
        NUMPY + "model = optimizer = sampler = None",
        "safetensors",
        last=7,
        instead=(
            ('"sampler": sampler', '"sampler": sampler, "weights": weights'),
            ("min_peers=4", ""),
        ),
    ),
    "docs/data.md 1": Shown("state", NUMPY + "examples = np.arange(960.0)", last=11),
    "docs/data.md 2": Shown(
        "state",
        TORCH
        + """
from torch.utils.data import DataLoader, TensorDataset
from pccl.data import ElasticSampler
pccl.init()
epochs, data = 2, TensorDataset(torch.randn(640, 3), torch.randn(640, 1))
sampler = ElasticSampler(640, batch_size=32)
state = {"model": model, "sampler": sampler}
def gradients(model):
    return [p.detach() for p in model.parameters()]
""",
        "torch",
    ),
    "docs/failure.md 1": Shown("state", NUMPY + 'state = {"weights": weights, "step": 0}', last=7),
    "docs/fsdp.md 1": Shown(
        "[p.detach().to_local() for p in model.parameters()], diloco.outer_step",
        TORCH
        + """
import os
os.environ["REPLICA"] = str(os.getpid())
def make_optimizer(parameters):
    return torch.optim.SGD(parameters, 0.05)
""",
        "torch",
        instead=(
            *FEWER_STEPS,
            ('"nccl")', '"gloo", store=dist.HashStore(), rank=0, world_size=1)'),
            ("fully_shard(model)", 'fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))'),
        ),
    ),
    "docs/shared-state.md 1": Shown("state", NUMPY, last=7),
    "docs/shared-state.md 2": Shown(
        "weights, m, state.revision",
        TORCH
        + """
import os
import numpy as np
steps, weights, m = 6, np.zeros(5, np.float32), torch.zeros(3)
gradient, mean = np.ones(5, np.float32), np.zeros(5, np.float32)
""",
        "torch",
        last=6,
        early=1,  # one that founds the group alone, as at level 1 the first one does
        instead=(
            ('"10.0.0.1:48148"', 'os.environ["PCCL_MASTER"]'),
            ("        comm.all_reduce(gradient, mean, op=ReduceOp.AVG)\n",
             "        if pccl.world_size(comm) > 1:\n"
             "            comm.all_reduce(gradient, mean, op=ReduceOp.AVG)\n"),
        ),
    ),
    "docs/shared-state.md 3": Shown(
        "state",
        NUMPY + 'from pccl import checkpoint\nstate = {"weights": weights, "step": 0}',
        "safetensors",
        instead=(("min_peers=4", ""),),
    ),
    "docs/training.md 1": Shown(ROUNDS, TORCH, "torch", instead=FEWER_STEPS),
    "docs/training.md 2": Shown(JAX_ROUNDS, JAX, "jax", instead=FEWER_STEPS),
    "pccl/training/data.py 1": Shown(
        "state", NUMPY + IN_A_RUN + "from pccl.data import ElasticSampler\nexamples = np.arange(960.0)"
    ),
    "pccl/training/diloco/algorithm.py 1": Shown(
        "w, b, diloco.outer_step",
        NUMPY
        + IN_A_RUN
        + """
from pccl.diloco import DiLoCo
w, b, batches = np.zeros(5), np.zeros(3), itertools.repeat(batch())
def train(w, b, batch):
    w += 0.1 * batch
""",
        instead=FEWER_STEPS,
    ),
    "adapters/torch/diloco.py 1": Shown(
        ROUNDS,
        TORCH
        + IN_A_RUN
        + """
from pccl.adapters.torch import DiLoCo
def make_model():
    return torch.nn.Linear(3, 1)
""",
        "torch",
        instead=FEWER_STEPS,
    ),
    "adapters/jax/_diloco.py 1": Shown(JAX_ROUNDS, JAX, "jax", instead=FEWER_STEPS),
}  # fmt: skip


# Arguments, modules, and whether the first peer founds the run alone.
EXAMPLES: dict[str, tuple[str, str, int]] = {
    "level1.py": ("", "numpy", 1),
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
ELSEWHERE = {"digits.py", "fsdp_diloco.py", "torch_ddp.py"}


def test_every_loop_that_is_shown_is_run() -> None:
    assert LOOPS.keys() == PROGRAMS.keys()
    names = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert names == EXAMPLES.keys() | ELSEWHERE | {"hello.py"}  # which has no loop


class Peers:
    """Processes whose output is heard together, and that end with the test."""

    def __init__(self, folder: Path, program: Path, result: str, arguments: list[str]) -> None:
        self._folder = folder
        self._rest = [result, str(program), *arguments]
        self._lines: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        self.heard: list[tuple[int, str]] = []

    def begin(self, role: str, turn: int, **env: str) -> None:
        script = str(ROOT / "tests" / "late.py")
        usual = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "STEPS": "8", "ROUNDS": "5"}
        process = subprocess.Popen(
            [sys.executable, script, role, str(turn), *self._rest],
            cwd=self._folder,
            env={**os.environ, **usual, "PCCL_LOCAL_RANK": str(len(self._processes)), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        thread = threading.Thread(target=self._read, args=(len(self._processes), process))
        thread.start()
        self._processes.append(process)
        self._threads.append(thread)

    def _read(self, number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put((number, line.rstrip()))
        self._lines.put((number, None))

    def hear(self, pattern: str, deadline: float) -> None:
        while True:
            number, line = self._next(deadline)
            assert line is not None, f"program {number} ended:\n{self.said()}"
            if re.search(pattern, line):
                return

    def ends(self, deadline: float) -> list[str]:
        """What each says at its end."""
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
    folder: Path, program: Path, result: str, arguments: list[str], turn: int, early: int
) -> None:
    """All end with the same, and with each other, though one comes at that admission point."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    peers = Peers(folder, program, result, arguments)
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
    code = f"{shown.before}\n{LOOPS[name]}"
    for old, new in shown.instead:
        code = code.replace(old, new)
    program = tmp_path / "program.py"
    program.write_text(code)
    check(tmp_path, program, shown.result, [], turn, shown.early)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_late_peer_joins_an_example_and_all_end_alike(name: str, tmp_path: Path) -> None:
    arguments, needs, early = EXAMPLES[name]
    for module in needs.split():
        pytest.importorskip(module)
    example = ROOT / "examples" / name
    text = example.read_text()
    result = "weights" if re.search(r"^weights = ", text, re.MULTILINE) else "None"
    check(tmp_path, example, result, arguments.split(), 3, early)
