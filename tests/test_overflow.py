"""Integers that do not fit: means never wrap, sums of arrays wrap as NumPy's, Python ints raise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from members import each, members

import pccl

INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]


@pytest.fixture(scope="module", params=["memory", "network"])
def three(request: pytest.FixtureRequest) -> Iterator[list[pccl.Communicator]]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "network":
            patch.setenv("PCCL_SHM", "0")
        with members(3) as comms:
            yield comms


@pytest.mark.parametrize("count", [1, 1000, 300_001])
@pytest.mark.parametrize("kind", INTEGERS)
def test_a_mean_of_large_integers_is_exact(
    three: list[pccl.Communicator], kind: str, count: int
) -> None:
    limits = np.iinfo(kind)
    rng = np.random.default_rng(count)
    near = rng.integers(0, 5, (3, count))
    high = rng.integers(0, 2, count).astype(bool)
    # Near one end of the range on all members.
    arrays = np.where(high, np.array(limits.max, kind), np.array(limits.min, kind))
    inputs = [np.where(high, arrays - n.astype(kind), arrays + n.astype(kind)) for n in near]
    if count == 1000:  # and in the fewer bits of float arrays beside them
        tree = [{"whole": array, "float": np.ones(5000, np.float32)} for array in inputs]
        made = [
            one["whole"]
            for one in each(
                three, lambda r, c: pccl.allreduce(tree[r], "avg", quantize="int8", comm=c)
            )
        ]
    else:
        made = each(three, lambda r, c: pccl.allreduce(inputs[r], "avg", comm=c))
    total = sum(array.astype(object) for array in inputs)
    wanted = (abs(total) // 3 * np.where(total < 0, -1, 1)).astype(kind)
    for result in made:
        assert result.dtype == np.dtype(kind)
        np.testing.assert_array_equal(result, wanted)


def test_a_part_of_a_mean_is_exact(three: list[pccl.Communicator]) -> None:
    x = np.full(3, 2**62)
    for part in each(three, lambda _, c: pccl.reduce_scatter(x, "avg", comm=c)):
        assert part.tolist() == [2**62]


def test_weighted_means_of_large_integers_stay_in_range(three: list[pccl.Communicator]) -> None:
    x = np.array([2**63 - 1, -(2**63), 2**62])
    for made in each(three, lambda r, c: pccl.allreduce(x, "avg", weight=r + 1, comm=c)):
        assert made.tolist() == [2**63 - 1024, -(2**63), 2**62]  # 53 bits


def test_sums_of_integer_arrays_wrap(three: list[pccl.Communicator]) -> None:
    for made in each(three, lambda _, c: pccl.allreduce(np.full(4, 2**62), comm=c)):
        assert made.tolist() == [3 * 2**62 - 2**64] * 4


@pytest.mark.parametrize(
    ("numbers", "op"),
    [
        ([2**62] * 3, "sum"),
        ([-(2**62)] * 3, "sum"),
        ([2**63 - 1, 1, 0], "sum"),
        ([-(2**63), -1, 0], "sum"),
        ([2**32, 2**31, 1], "prod"),
        ([2**62, 2**62, 2**62], "prod"),
        ([-(2**63), -1, 1], "prod"),
    ],
)
def test_python_ints_that_do_not_fit_raise_on_all_members(
    three: list[pccl.Communicator], numbers: list[int], op: str
) -> None:
    def call(rank: int, comm: pccl.Communicator) -> Any:
        try:
            return pccl.allreduce({"n": numbers[rank]}, op, comm=comm)
        except OverflowError as error:
            return str(error)

    for told in each(three, call):
        assert isinstance(told, str) and "tree['n']" in told


@pytest.mark.parametrize(
    ("numbers", "op", "wanted"),
    [
        ([2**63 - 1, 5, -5], "sum", 2**63 - 1),
        ([-(2**63) + 7, -7, 0], "sum", -(2**63)),
        ([2**62, 2**62, -(2**62)], "sum", 2**62),
        ([2**62, 2**62, 0], "prod", 0),
        ([2**31, 2**31, -2], "prod", -(2**63)),
        ([3, 5, 7], "prod", 105),
        ([2**62] * 3, "max", 2**62),
    ],
)
def test_python_ints_that_fit_are_exact(
    three: list[pccl.Communicator], numbers: list[int], op: str, wanted: int
) -> None:
    for made in each(three, lambda r, c: pccl.allreduce(numbers[r], op, comm=c)):
        assert type(made) is int and made == wanted


def test_numpys_integers_meet_pythons_and_have_to_fit(three: list[pccl.Communicator]) -> None:
    def call(rank: int, comm: pccl.Communicator, number: int) -> Any:
        try:
            return pccl.allreduce(np.int64(number) if rank == 0 else 2, "prod", comm=comm)
        except OverflowError:
            return "does not fit"

    assert each(three, lambda r, c: call(r, c, 2**62)) == ["does not fit"] * 3
    made = each(three, lambda r, c: call(r, c, 3))
    assert made == [12] * 3 and [type(number) for number in made] == [np.int64, int, int]


def test_an_int_that_does_not_fit_leaves_the_arrays_beside_it(
    three: list[pccl.Communicator],
) -> None:
    trees = [{"a": np.arange(3.0), "n": 2**62} for _ in three]

    def call(rank: int, comm: pccl.Communicator) -> None:
        out = {"a": trees[rank]["a"], "n": np.zeros((), np.int64)}
        with pytest.raises(OverflowError):
            pccl.allreduce(trees[rank], out=out, comm=comm)
        assert out["n"] == 0

    each(three, call)
    assert all(list(tree["a"]) == [0, 1, 2] for tree in trees)


def test_a_python_int_is_summed_into_an_array(three: list[pccl.Communicator]) -> None:
    """Members with `out` meet those without, and the int has to fit all the same."""

    def call(rank: int, comm: pccl.Communicator, number: int) -> Any:
        out = None if rank == 0 else np.zeros((), np.int64)
        try:
            return int(pccl.allreduce(number, out=out, comm=comm))
        except OverflowError:
            return "does not fit"

    assert each(three, lambda r, c: call(r, c, r + 1)) == [6] * 3
    assert each(three, lambda r, c: call(r, c, 2**62)) == ["does not fit"] * 3
