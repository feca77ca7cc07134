"""Groups of one to three members in this process, over TCP and in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from members import members, results

import pccl
from pccl import _core

Comm = pccl.Communicator
SIZES = [1, 1000, 300_001]
KINDS = ["f4", "u1", "c8", "M8[s]", "bfloat16", "S3"]


def dtype(kind: str) -> np.dtype[Any]:
    if kind != "bfloat16":
        return np.dtype(kind)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module", params=["1, tcp", "2, tcp", "2, shm", "3, tcp", "3, shm"])
def group(request: pytest.FixtureRequest) -> Iterator[list[Comm]]:
    """Members of one run in this process, in rank order."""
    count, _, transport = request.param.partition(", ")
    size, shared = int(count), transport == "shm"
    if shared and not _core.shares_memory():
        pytest.skip("this build shares no memory between processes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCCL_SHM", str(int(shared)))
        with members(size) as comms:

            def settle(comm: Comm, _: int) -> None:
                # Members of one host find each other's memory in an epoch of its own.
                while pccl.allreduce(1, comm=comm, return_info=True)[1].epoch < 2 and shared:
                    pass

            each(comms, settle)
            yield comms


def each(group: list[Comm], call: Callable[[Comm, int], Any]) -> list[Any]:
    """What `call(comm, rank)` returns on each member."""
    return results(group, lambda rank, comm: call(comm, rank))


def own(rank: int, count: int, kind: str = "f4") -> np.ndarray[Any, Any]:
    """An array that is another one on each member."""
    values = np.random.default_rng([rank, count]).integers(0, 100, count)
    if kind.startswith("S"):
        return values.astype("S3")
    return values.astype(dtype(kind))


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Comm]]:
    with members(2) as comms:
        each(comms, lambda comm, _: pccl.barrier(comm=comm))
        yield comms
