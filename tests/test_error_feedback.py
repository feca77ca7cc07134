"""Error feedback of quantized operations: what is kept, and to which call it is added."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from members import each, members
from workers import eventually

import pccl
from pccl.reduce.residuals import Residual, Use, _fitting

COUNT = 5000
INT4 = pccl.Quantize("int4", error_feedback=True)

Comms = list[pccl.Communicator]
Floats = npt.NDArray[np.float32]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Comms]:
    monkeypatch.setenv("PCCL_SHM", "0")  # on one host nothing is quantized
    with members(2) as comms:
        yield comms


def normals(seed: int) -> list[Floats]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(COUNT, np.float32) for _ in range(2)]


def kept(comms: Comms) -> list[Floats]:
    """Each member's residual, of the only array."""
    found = []
    for comm in comms:
        [one] = comm._residuals.kept.values()
        found.append(one.values.view(np.float32).copy())
    return found


@pytest.mark.parametrize("weights", [(512, 8), (512, None), (8, 512), (None, 0.01), (512, 0)])
def test_errors_of_a_larger_weight_are_no_larger_in_a_smaller_one(
    pair: Comms, weights: tuple[float | None, float | None]
) -> None:
    for number, weight in enumerate([weights[0]] * 3 + [weights[1]] * 2):
        arrays = normals(number)
        own = [1 if weight == 0 else weight, weight]  # the sum of all must not be 0
        calls = [
            partial(pccl.allreduce, array, "avg", weight=one, quantize=INT4)
            for array, one in zip(arrays, own, strict=True)
        ]
        first, second = each(pair, lambda rank, comm, calls=calls: calls[rank](comm=comm))
        assert (first == second).all()
        exact = arrays[0] if weight == 0 else (arrays[0] + arrays[1]) / 2
        assert np.abs(first - exact).max() < 1  # without feedback 0.3, with equal weights 0.5


def test_a_call_that_fails_changes_nothing(pair: Comms) -> None:
    arrays = normals(0)
    each(pair, lambda i, comm: pccl.allreduce(arrays[i], quantize=INT4, comm=comm))
    before = kept(pair)

    def differ(i: int, comm: pccl.Communicator) -> Any:
        return pccl.allreduce(arrays[i][: 100 if i else COUNT], quantize=INT4, comm=comm)

    assert [type(error) for error in each(pair, differ)] == [pccl.MismatchedCall] * 2
    assert np.array_equal(kept(pair), before)


def test_two_operations_at_once_do_not_add_the_same_errors(
    pair: Comms, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, nothing = normals(0), np.zeros(COUNT, np.float32)
    each(pair, lambda i, comm: pccl.allreduce(arrays[i], quantize=INT4, comm=comm))
    residuals = pair[0]._residuals
    take, taken = residuals.take, []
    monkeypatch.setattr(residuals, "take", lambda *args: (taken.append(take(*args)), taken[-1])[1])
    # The second member's part comes later, so both operations of the first one are under way.
    works = [pccl.allreduce_async(nothing, quantize=INT4, comm=pair[0]) for _ in range(2)]
    late = [pccl.allreduce(nothing, quantize=INT4, comm=pair[1]) for _ in range(2)]
    assert [work.wait().tolist() for work in works] == [one.tolist() for one in late]
    assert taken[0] != [None] and taken[1] == [None]


def test_calls_of_several_threads_with_one_tag_share_no_errors(pair: Comms) -> None:
    residuals, names = pair[0]._residuals, [(" 0", f"float32[{COUNT}]")]
    array = np.zeros(4 * COUNT, np.uint8)
    arrays = [(array, array, int(pccl.DataType.FLOAT))]
    taken = residuals.take(arrays, Use(1), names)
    assert taken != [None]
    assert residuals.take(arrays, Use(1), names) == [None]  # the first one is about to start
    assert residuals.take(arrays, Use(2), names) != [None]
    residuals.give_back(taken)
    taken = residuals.take(arrays, Use(1), names)
    assert taken != [None]
    del taken  # as by Ctrl-C before the start
    assert residuals.take(arrays, Use(1), names) != [None]


def test_a_call_with_an_invalid_weight_leaves_the_errors_as_they_were(pair: Comms) -> None:
    def mean(weight: float, seed: int) -> list[Any]:
        arrays = normals(seed)
        call = partial(pccl.allreduce, op="avg", quantize=INT4)
        return each(pair, lambda i, comm: call(arrays[i], weight=weight if i else 0.01, comm=comm))

    for seed in range(3):
        mean(512, seed)
    before = kept(pair)[1]
    assert [type(error) for error in mean(-1, 3)] == [pccl.InvalidArgument] * 2
    assert np.array_equal(kept(pair)[1], before)


def test_arrays_of_an_operation_that_nobody_waited_for_are_free_at_the_next_one(
    pair: Comms,
) -> None:
    def drop(_: int, comm: pccl.Communicator) -> Any:
        out = np.zeros(COUNT, np.float32)
        work = pccl.allreduce_async(np.ones(COUNT, np.float32), out=out, quantize=INT4, comm=comm)
        eventually(work.done)
        return weakref.ref(out)

    dropped = each(pair, drop)
    each(pair, lambda _, comm: pccl.allreduce({"x": normals(0)[0]}, quantize=INT4, comm=comm))
    gc.collect()
    assert [ref() for ref in dropped] == [None, None]


def test_errors_shrink_with_the_members_of_a_mean() -> None:
    left = Residual((None, ""), "float32[3]", np.ones(3, np.float32).view(np.uint8), 2.0, 100)
    for use, factor in [
        (Use(None, 2.0, 100), 1),
        (Use(None, 2.0, 2), 0.02),
        (Use(None, 2.0, 200), 1),
        (Use(None, 0.5, 50), 0.125),
        (Use(None, 2.0), 1),  # a sum: not divided
        (Use(None, 0.0, 100), 0),
    ]:
        fitting = _fitting(left, use, "f4")
        assert (fitting.values.view(np.float32) == np.float32(factor)).all(), use
        assert (fitting.values is left.values) == (factor == 1)
    assert (left.values.view(np.float32) == 1).all()


def test_errors_shrink_with_members_that_are_lost_in_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PCCL_SHM", "0")
    mean = partial(pccl.allreduce, op="avg", quantize=INT4)
    start = partial(pccl.allreduce_async, op="avg", quantize=INT4)

    def mean_of_zeros(lost_in_the_call: bool) -> Floats:
        with members(4) as comms:
            for seed in range(3):
                arrays = [*normals(seed), *normals(seed + 10)]
                each(comms, lambda rank, comm, arrays=arrays: mean(arrays[rank], comm=comm))
            left, lost = comms[:2], comms[2:]
            zeros = np.zeros(COUNT, np.float32)
            if not lost_in_the_call:
                each(lost, lambda _, comm: comm.close())
                each(left, lambda _, comm: pccl.allreduce(1, comm=comm))
            works = each(left, lambda _, comm: start(zeros, comm=comm))
            if lost_in_the_call:
                each(lost, lambda _, comm: comm.close())
            first, second = each(left, lambda rank, _: works[rank].wait())
            assert (first == second).all() and works[0].info.local_world_size == 2
            return first

    found = mean_of_zeros(True)
    assert found.any() and (found == mean_of_zeros(False)).all()
