"""Tensors on an accelerator that torch does not know: every call takes them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from made_once import made_once
from workers import Run, Worker

torch = pytest.importorskip("torch")

from programs import torch_device as programs  # noqa: E402

SOURCE = Path(__file__).parents[1] / "cpp/tests/torch_device/pretend.cpp"


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The device as a library that torch loads."""
    from torch.utils.cpp_extension import include_paths, library_paths

    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")

    def compile_it(to: Path) -> None:
        subprocess.run(
            ["c++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", str(SOURCE), "-o", str(to)]
            + [f"-isystem{path}" for path in include_paths()]
            + [f"-L{path}" for path in library_paths()]
            + ["-lc10", "-ltorch_cpu", "-ltorch"],
            check=True,
        )

    return str(made_once(tmp_path_factory, "pretend.so", compile_it))


@pytest.mark.parametrize(
    "program",
    [
        programs.allreduce,
        programs.allreduce_async,
        programs.collectives,
        programs.explicit,
        programs.described,
        programs.described_state,
        programs.described_state_that_cannot_be_written,
        programs.shared_state,
        programs.diloco,
        programs.quantized,
        programs.newcomers,
        programs.following,
        programs.ddp_hook,
    ],
    ids=lambda program: program.__name__,
)
def test_a_tensor_may_be_on_any_device(device: str, program: Callable[[], None]) -> None:
    worker = Worker(program, PRETEND=device)
    try:
        assert worker.ends(120) == 0, worker.stderr()
    finally:
        worker.destroy()


def test_ddp_averages_gradients_on_any_device(device: str, run: Run) -> None:
    for peer in run.peers(2, programs.ddp, PRETEND=device):
        peer.expect("done", 90)


def test_the_backend_takes_tensors_on_any_device(device: str, tmp_path: Path) -> None:
    job = {"SIZE": "2", "STORE": str(tmp_path / "store"), "PRETEND": device}
    ranks = [Worker(programs.backend, RANK=str(rank), **job) for rank in range(2)]
    try:
        for rank in ranks:
            rank.expect("done", 90)
    finally:
        for rank in ranks:
            rank.destroy()
