"""A group with more members than have links to all others: every call, over TCP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from members import members, results

import pccl

Comm = pccl.Communicator
WORLD = 36
# One owner, twice; all members as owners; a ring.
SIZES = [1, 2_000, 300_001, 600_001]


@pytest.fixture(scope="module")
def group() -> Iterator[list[Comm]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCCL_SHM", "0")
        patch.setenv("PCCL_THREADS", "1")
        with members(WORLD) as comms:
            yield comms


def own(rank: int, count: int, dtype: str = "f4") -> np.ndarray[Any, Any]:
    return np.random.default_rng([rank, count]).integers(0, 100, count).astype(dtype)


def total(count: int) -> np.ndarray[Any, Any]:
    return np.sum([own(rank, count) for rank in range(WORLD)], axis=0)


def test_it_reduces_by_regions_up_to_a_size(group: list[Comm]) -> None:
    plan = group[0].topology()
    assert [schedule.kind for schedule in plan.schedules] == ["regional", "regional", "ring"]
    assert sorted(set(plan.regions)) == list(range(6))


@pytest.mark.parametrize("count", SIZES)
def test_all_hold_the_sum(group: list[Comm], count: int) -> None:
    made = results(group, lambda rank, comm: pccl.allreduce(own(rank, count), "sum", comm=comm))
    for array in made:
        assert array.tobytes() == total(count).tobytes()


@pytest.mark.parametrize("count", SIZES)
def test_all_hold_the_same_bytes_of_quantized_and_of_narrow_means(
    group: list[Comm], count: int
) -> None:
    import ml_dtypes

    def call(rank: int, comm: Comm) -> Any:
        codes = pccl.allreduce(own(rank, count), "avg", quantize="int8", comm=comm)
        narrow = own(rank, count).astype(ml_dtypes.bfloat16)
        return codes, pccl.allreduce(narrow, "avg", comm=comm)

    made = results(group, call)
    mean = total(count) / WORLD
    for codes, narrow in made:
        assert codes.tobytes() == made[0][0].tobytes()
        assert narrow.tobytes() == made[0][1].tobytes()
        # Three roundings to a step of 1/127 of the range; a bfloat16 has eight bits.
        assert np.abs(codes - mean).max() <= 3 * 100 / 127
        assert np.abs(narrow.astype("f4") - mean).max() <= 100 / 256


@pytest.mark.parametrize("count", [1, 3_000, 10_000])
def test_the_other_collectives(group: list[Comm], count: int) -> None:
    parts = [own(rank, WORLD * count).reshape(WORLD, count) for rank in range(WORLD)]

    def call(rank: int, comm: Comm) -> Any:
        return (
            pccl.allgather(own(rank, count), comm=comm),
            pccl.broadcast(own(rank, count), root=7, comm=comm),
            pccl.reduce_scatter(parts[rank], "sum", comm=comm),
            pccl.alltoall(parts[rank], comm=comm),
        )

    everything = np.stack([own(rank, count) for rank in range(WORLD)])
    sums = np.sum(parts, axis=0)
    for rank, (gathered, sent, part, exchanged) in enumerate(results(group, call)):
        assert gathered.tobytes() == everything.tobytes()
        assert sent.tobytes() == own(7, count).tobytes()
        assert part.tobytes() == sums[rank].tobytes()
        assert exchanged.tobytes() == np.stack([one[rank] for one in parts]).tobytes()


def test_the_others_go_on_after_a_loss(group: list[Comm]) -> None:
    group.pop().close()
    made = results(group, lambda rank, comm: pccl.allreduce(own(rank, 100), "sum", comm=comm))
    wanted = np.sum([own(rank, 100) for rank in range(len(group))], axis=0)
    for array in made:
        assert array.tobytes() == wanted.tobytes()
