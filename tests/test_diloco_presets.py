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


@given(
    members=st.integers(1, 300),
    parameters=st.floats(1, 1e11),
    megabits=st.floats(0.1, 1e5),
    step_seconds=st.floats(0.001, 100),
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
    share = width * (members - 1) / members if plan.sparse is None else 0.056 * (members - 1)
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
    ],
)
def test_numbers_that_make_no_sense_are_named(wrong: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"members": 2, "parameters": 1e6, "megabits": 1, "step_seconds": 1}
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        preset(**(usual | wrong))
    with pytest.raises(InvalidArgument, match="a reduction wants"):
        preset(members=2, parameters=1e12, megabits=1, step_seconds=1)
