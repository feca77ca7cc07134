"""The learning rate follows the global batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from members import Members, each

import pccl
from pccl.data import learning_rate


def test_it_follows_the_square_root_of_the_batch_or_the_batch() -> None:
    assert learning_rate(1e-3, 256, 256) == 1e-3
    assert learning_rate(1e-3, 1024, 256) == 2e-3
    assert learning_rate(1e-3, 1024, 256, rule="linear") == 4e-3
    assert learning_rate(1e-3, 128, 256, rule="linear") == 5e-4


@given(
    usual=st.floats(1e-6, 10), batches=st.tuples(*[st.floats(1, 1e12)] * 3), linear=st.booleans()
)
def test_two_changes_of_the_batch_are_as_one(
    usual: float, batches: tuple[float, float, float], linear: bool
) -> None:
    first, second, third = batches
    rule: Any = "linear" if linear else "sqrt"
    twice = learning_rate(learning_rate(usual, second, first, rule=rule), third, second, rule=rule)
    assert math.isclose(twice, learning_rate(usual, third, first, rule=rule), rel_tol=1e-9)


def test_members_with_other_batches_get_the_rate_of_what_all_have_seen(members: Members) -> None:
    def step(rank: int, comm: pccl.Communicator) -> float:
        gradient = np.ones(3, np.float32)
        size = 8 * (rank + 1)
        _, info = pccl.allreduce(gradient, "avg", weight=size, return_info=True, comm=comm)
        assert info.total_weight is not None
        return learning_rate(0.1, info.total_weight, 12, rule="linear")

    assert each(members(3), step) == [0.4] * 3


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"usual": 0.0}, "usual is a positive number, not 0.0"),
        ({"batch": -1}, "batch is a positive number, not -1"),
        ({"usual_batch": math.nan}, "usual_batch is a positive number, not nan"),
        ({"batch": math.inf}, "batch is a positive number, not inf"),
        ({"batch": None}, "batch is a positive number, not None"),  # `total_weight` without weights
        ({"usual": "0.1"}, "usual is a positive number, not '0.1'"),
        ({"rule": "cubic"}, 'rule is "sqrt" or "linear", not \'cubic\''),
    ],
)
def test_numbers_that_make_no_sense_are_named(wrong: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"usual": 0.1, "batch": 8, "usual_batch": 8}
    with pytest.raises(pccl.InvalidArgument, match=words):
        learning_rate(**(usual | wrong))
