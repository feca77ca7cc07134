"""Programs of torch.distributed give on backend "pccl" what they give on Gloo: those of `torch_programs.py`."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pccl import errors

pytest.importorskip("torch")

FILE = Path(__file__).with_name("torch_programs.py")
LIMIT = 180  # seconds; a program that hangs is no program that is slow


def run(name: str, backend: str, size: int, folder: Path) -> list[Any]:
    """What every rank returns. All ranks exit, and exit well."""
    store = folder / f"store-{backend}"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(FILE), name, backend],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "RANK": str(rank),
                "SIZE": str(size),
                "STORE": str(store),
                "GLOO_SOCKET_IFNAME": "lo",
                "PCCL_BIND": "127.0.0.1",
            },
            cwd=tempfile.gettempdir(),
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, error) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, error.decode()
    return [json.loads(output) for output, _ in said]


PROGRAMS = [
    ("power_sgd", 2),
    ("python_hooks", 2),
    ("builtin_hooks", 2),
    ("join", 3),
    ("fsdp1", 2),
    ("callback_starts_a_collective", 3),
    ("dropped_work", 2),
    ("storages_stay_resizable", 2),
    ("one_element_views", 3),
    ("late_rank_at_a_barrier", 3),
    ("monitored_barrier", 3),
    ("models_that_differ", 3),
    ("profiler", 2),
    ("compiled_ddp", 2),
    ("compiled_collectives", 3),
]


@pytest.mark.parametrize(("name", "size"), PROGRAMS)
def test_a_program_gives_on_pccl_what_it_gives_on_gloo(
    name: str, size: int, tmp_path: Path
) -> None:
    gloo, ours = (run(name, backend, size, tmp_path) for backend in ("gloo", "pccl"))
    assert ours == gloo


@pytest.mark.parametrize("cls", [errors.PeerLost, errors.Timeout, errors.MismatchedCall])
def test_an_error_of_a_collective_is_both_pccls_and_torchs(cls: type[errors.PCCLError]) -> None:
    import torch.distributed as dist

    from pccl.adapters._c10d_errors import as_torch_error

    made = as_torch_error(cls.because("allreduce", "rank 1 is gone"))
    for error in (made, pickle.loads(pickle.dumps(made))):
        assert isinstance(error, cls)
        assert isinstance(error, dist.DistBackendError)
        assert "rank 1 is gone" in str(error)
        assert ("Timed out" in str(error)) == (cls is errors.Timeout)
