"""CuPy arrays, with a stand-in for CuPy. tests/test_cuda.py has the real one."""

from __future__ import annotations

import subprocess

import pytest
from programs import cupy_arrays
from workers import command


@pytest.mark.parametrize("shm", ["1", "0"], ids=["shm", "tcp"])
def test_calls_take_cupy_arrays(monkeypatch: pytest.MonkeyPatch, shm: str) -> None:
    monkeypatch.setenv("DEVICE", "pretend")
    monkeypatch.setenv("PCCL_SHM", shm)
    subprocess.run(command(cupy_arrays.calls), check=True, timeout=120)
