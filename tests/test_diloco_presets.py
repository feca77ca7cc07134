"""Options that are computed fit the network that they are computed for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.diloco import DiLoCo, Sparse, preset
from pccl.errors import InvalidArgument
from pccl.training.diloco import presets
from pccl.training.diloco.options import Options, Plan


@pytest.mark.parametrize(
    ("megabits", "found"),
    [
        (10_000, {"sync_every": 50}),
        (1000, {"sync_every": 50, "quantize": "int8"}),
        (100, {"sync_every": 150, "quantize": "int8"}),
        (10, {"sync_every": 500, "quantize": "int8", "mode": "async", "overlap": 178}),
        (2, {"sync_every": 500, "compression": Sparse(), "mode": "async", "overlap": 196}),
    ],
)
def test_slower_networks_get_fewer_bytes(megabits: float, found: dict[str, Any]) -> None:
    exact = {"outer_lr": 0.8, "outer_momentum": 0.9} if "compression" not in found else {}
    given = {"members": 8, "parameters": 1e8, "step_seconds": 1.0}
    assert preset(megabits=megabits, **given) == {**exact, **found}


def test_the_outer_learning_rate_grows_with_the_members() -> None:
    usual = {"parameters": 1e6, "megabits": 100, "step_seconds": 1}
    rates = [preset(members=count, **usual)["outer_lr"] for count in (1, 2, 4, 8, 64)]
    assert rates == [0.4, 0.6, 0.6, 0.8, 0.8]


def test_many_members_on_thin_lines_send_int8_and_less_momentum() -> None:
    found = preset(members=64, parameters=1e8, megabits=5, step_seconds=1)
    assert (found["quantize"], found["outer_momentum"]) == ("int8", 0.5)
    assert 250 < (found["overlap"] or 0) <= 500


@pytest.mark.parametrize(
    ("rounds", "outer_lr"), [(1, 3.0), (30, 3.0), (40, 3.0), (50, 3.0), (51, None), (None, None)]
)
def test_sparse_codes_of_a_short_run_get_a_larger_outer_learning_rate(
    rounds: int | None, outer_lr: float | None
) -> None:
    usual = {"members": 4, "parameters": 1e6, "megabits": 100, "step_seconds": 0.2}
    found = preset(**usual, rounds=rounds, compression="sparse")
    options = {"sync_every": 50, "compression": Sparse()}
    assert found == options | ({} if outer_lr is None else {"outer_lr": outer_lr})
    diloco = DiLoCo({"w": np.zeros(3, np.float32)}, **found, join=False)
    assert f"lr={outer_lr or 1.0}, momentum=0.0" in diloco._settings
    # It says nothing of other codes, and nobody has measured it with means that come late.
    assert preset(**usual, rounds=rounds) == preset(**usual)
    thin = {**usual, "megabits": 0.1, "compression": "sparse"}
    assert preset(**thin, rounds=rounds) == preset(**thin) and "outer_lr" not in preset(**thin)


def test_sparse_codes_that_are_asked_for_make_rounds_as_long_as_their_bytes_need() -> None:
    usual = {"members": 8, "parameters": 1e8, "step_seconds": 1, "compression": "sparse"}
    found = [preset(**usual, megabits=megabits) for megabits in (10_000, 100, 10, 2)]
    steps = [(one["sync_every"], one.get("mode"), one.get("overlap")) for one in found]
    assert steps == [(50, None, None), (50, None, None), (160, None, None), (500, "async", 196)]
    assert all(one.get("compression") == Sparse() and "quantize" not in one for one in found)


@given(
    members=st.integers(1, 300),
    parameters=st.floats(1, 1e11),
    megabits=st.floats(0.1, 1e5),
    step_seconds=st.floats(0.001, 100),
    rounds=st.none() | st.integers(1, 1000),
    compression=st.sampled_from([None, "sparse"]),
)
def test_options_are_valid_and_members_wait_little(**numbers: Any) -> None:
    try:
        found = preset(**numbers)
    except InvalidArgument as error:
        assert "train fewer parameters" in str(error)
        return
    plan = Plan.of(Options(**found), ["w"], [10])
    members, width = numbers["members"], 8.0
    if plan.quantize is not None:
        width = 2.03
    share = width * (members - 1) / members
    if plan.sparse is not None:
        width = 0.056 * members
        if plan.mode == "sync" and members >= 6:
            width = next(owned for most, owned in presets._OWNED if members <= most)
        share = width * (members - 1) / members
    steps = share * numbers["parameters"] * 8 / numbers["megabits"] / 1e6 / numbers["step_seconds"]
    room = plan.overlap if plan.mode == "async" else plan.sync_every / 10
    assert steps <= room + 1e-6 or math.isclose(steps, room)


def test_a_run_takes_them() -> None:
    found = preset(members=2, parameters=3, megabits=1, step_seconds=1)
    diloco = DiLoCo({"w": np.zeros(3, np.float32)}, **found, join=False)
    assert "int8" in diloco._settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"members": 0},
        {"members": 2.0},
        {"members": True},
        {"parameters": 0},
        {"parameters": math.nan},
        {"parameters": 1e308},
        {"megabits": math.inf},
        {"megabits": "100"},
        {"step_seconds": -1},
        {"rounds": 0},
        {"rounds": 40.0},
        {"compression": "int8"},
    ],
)
def test_numbers_that_make_no_sense_are_named(wrong: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"members": 2, "parameters": 1e6, "megabits": 1, "step_seconds": 1}
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        preset(**(usual | wrong))
    with pytest.raises(InvalidArgument, match="a reduction wants"):
        preset(members=2, parameters=1e12, megabits=1, step_seconds=1)
