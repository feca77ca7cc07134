"""`pccl.prepare`: links get filler before a call that the program announces."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from members import members, results

import pccl
from pccl import _testing, diloco
from pccl.peer import Peer
from pccl.training.diloco import round_clock


def test_filler_begins_six_round_trips_before_the_call_and_ends_with_it() -> None:
    [far, near, between] = _testing.primed(
        [(80, 4000, 10**6), (4, 4000, 10**6), (20, 500, 10**6)], 1000, 1300
    )
    # A portion is what is on the way at full rate. The next one comes if the call is late, before
    # the connection would begin slowly again.
    assert far == [(520, 4000), (1100, 4000)]
    assert near == []
    assert between == [(880, 500), (1100, 500)]


def test_filler_ends_a_second_after_a_call_that_does_not_come() -> None:
    [portions] = _testing.primed([(50, 100, 10**6)], 0, 5000)
    assert [at for at, _ in portions] == [0, 400, 650, 900]


def test_filler_has_a_limit() -> None:
    [portions, none] = _testing.primed([(50, 100, 250), (50, 100, 0)], 0, 5000)
    assert portions == [(0, 100), (400, 100), (650, 50)]
    assert none == []


def test_prepare_refuses_what_is_no_time_or_size() -> None:
    with pytest.raises(pccl.NotInitialized):
        pccl.prepare(1)
    with members(1) as [comm]:
        for wrong in (-0.1, 3600.1, 10**400, math.nan, math.inf, "soon", None):
            with pytest.raises(pccl.InvalidArgument, match="seconds is a number from 0 to 3600"):
                comm.prepare(wrong)  # type: ignore[arg-type]
        for wrong in (0, -1, 1.5, "all", True):
            with pytest.raises(pccl.InvalidArgument, match="nbytes must be an integer"):
                comm.prepare(nbytes=wrong)  # type: ignore[arg-type]
        comm.prepare()
        comm.prepare(3600, nbytes=1, quantized=True)


def test_calls_after_a_notice_are_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_SHM", "0")

    def reduce(rank: int, comm: pccl.Communicator) -> list[float]:
        comm.prepare()  # not a member yet
        sums = []
        for step in range(4):
            sums.append(float(pccl.allreduce(np.full(9, rank + step), comm=comm)[0]))
            if rank == 0:
                pccl.prepare(0.01, nbytes=72, comm=comm)
        return sums

    with members(2) as comms:
        assert results(comms, reduce) == [[1.0, 3.0, 5.0, 7.0]] * 2


@pytest.mark.parametrize(
    ("options", "pace", "notices"),
    [
        # One step before each reduction, however long steps are.
        ({"sync_every": 4}, 7.0, [(3, 7.0), (7, 7.0)]),
        # Two seconds before, with shorter steps, and again in the last step.
        ({"sync_every": 8}, 0.5, [(4, 2.0), (7, 0.5), (12, 2.0), (15, 0.5)]),
        # Rounds of one step each, from the second one on.
        ({"sync_every": 1}, 7.0, [(1, 7.0), (2, 7.0), (3, 7.0)]),
        # Rounds that end by their time.
        ({"sync_every": 8, "round_seconds": 12}, 5.0, [(1, 5.0), (3, 5.0)]),
        # Each fragment's reduction.
        ({"sync_every": 4, "mode": "streaming"}, 7.0, [(1, 7.0), (3, 7.0), (5, 7.0), (7, 7.0)]),
    ],
)
def test_diloco_announces_its_reductions(
    options: dict[str, Any],
    pace: float,
    notices: list[tuple[int, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = itertools.count()
    monkeypatch.setattr(round_clock, "now", lambda: pace * next(times))
    told: list[tuple[int, float]] = []
    steps = 0

    def note(_: Peer, seconds: float, nbytes: int, quantized: bool) -> None:
        told.append((steps, seconds))
        assert not quantized
        assert nbytes == (40 if options.get("mode") == "streaming" else 80)

    monkeypatch.setattr(Peer, "_expect_operation", note)
    with members(1) as [comm]:
        model = {"w": np.zeros(10, np.float32), "b": np.zeros(10, np.float32)}
        if options.get("mode") == "streaming":
            options = {**options, "fragments": 2}
        training = diloco.DiLoCo(model, comm=comm, **options)
        while len(told) < len(notices):
            steps += 1
            assert steps < 100
            training.step()
    assert told == notices


@pytest.mark.parametrize(
    ("dtype", "options", "nbytes"),
    [
        (np.float64, {}, 160),
        (np.float32, {"quantize": "int8"}, 20),
        # An all-gather of two members sends as much as an all-reduce of one of these arrays.
        (np.float32, {"robust": "clip"}, 80),
        (np.float64, {"robust": "clip"}, 160),
    ],
)
def test_diloco_announces_the_bytes_of_its_reductions(
    dtype: type, options: dict[str, Any], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, bool]] = []
    monkeypatch.setattr(Peer, "_expect_operation", lambda _, seconds, *how: told.append(how))

    def train(rank: int, comm: pccl.Communicator) -> None:
        model = {"w": np.zeros(20, dtype)}
        training = diloco.DiLoCo(model, sync_every=2, comm=comm, **options)
        training.step()

    with members(2) as comms:
        results(comms, train)
    assert set(told) == {(nbytes, "quantize" in options)}
