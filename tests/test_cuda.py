"""Tensors and arrays on a CUDA device. `pytest -m gpu` runs these alone."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from workers import Run, Worker, command

torch = pytest.importorskip("torch")

from programs import cuda, torch_device  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "program",
    [
        torch_device.allreduce,
        torch_device.allreduce_async,
        torch_device.collectives,
        torch_device.explicit,
        torch_device.described,
        torch_device.described_state,
        torch_device.shared_state,
        torch_device.diloco,
        torch_device.quantized,
        torch_device.newcomers,
        torch_device.following,
        torch_device.ddp_hook,
        cuda.order,
        cuda.bytes_of_all_types,
        cuda.codes,
        cuda.memory,
        cuda.threads,
        cuda.jax_arrays,
        cuda.cupy_arrays,
    ],
    ids=lambda program: program.__name__,
)
@pytest.mark.parametrize("shm", ["1", "0"], ids=["shm", "tcp"])
def test_calls_take_what_is_on_the_device(
    monkeypatch: pytest.MonkeyPatch, program: Callable[[], None], shm: str
) -> None:
    for module, package in ((cuda.jax_arrays, "jax"), (cuda.cupy_arrays, "cupy")):
        if program is module:
            pytest.importorskip(package)
    monkeypatch.setenv("DEVICE", "cuda")
    monkeypatch.setenv("PCCL_SHM", shm)
    subprocess.run(command(program), check=True, timeout=240)


def ranks_of(program: Callable[[], None], tmp_path: Path) -> list[dict[str, object]]:
    """Returns what two ranks of a torch job say at their end."""
    job = {"SIZE": "2", "STORE": str(tmp_path / "store"), "DEVICE": "cuda"}
    ranks = [Worker(program, RANK=str(rank), **job) for rank in range(2)]
    try:
        return [rank.expect("done", 200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.destroy()


def test_the_backend_takes_tensors_on_the_device(tmp_path: Path) -> None:
    ranks_of(torch_device.backend, tmp_path)


def test_the_backend_follows_the_stream_of_its_caller(tmp_path: Path) -> None:
    ranks_of(cuda.side_stream, tmp_path)


def test_ddp_and_fsdp_train_alike_on_the_device(tmp_path: Path) -> None:
    first, second = ranks_of(cuda.train, tmp_path)
    assert first["ddp"] == second["ddp"] and first["fsdp"] == second["fsdp"]
    assert first["ddp"][-1] < first["ddp"][0]  # type: ignore[index]
    assert first["ddp"] == pytest.approx(first["fsdp"], rel=1e-4)


@pytest.mark.parametrize("shm", ["1", "0"], ids=["shm", "tcp"])
def test_a_member_lost_between_two_pieces_is_in_no_part_of_the_sum(
    run: Run, monkeypatch: pytest.MonkeyPatch, shm: str
) -> None:
    monkeypatch.setenv("PCCL_SHM", shm)
    workers = [run.peer(cuda.lose_a_member) for _ in range(3)]
    for worker in workers:
        worker.expect("going", 120)
    workers[2].signal(signal.SIGKILL)
    for worker in workers[:2]:
        assert worker.expect("done", 60)["members"] == 2
