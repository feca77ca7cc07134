"""Rounds at the beginning of a run in which members reduce several times."""

from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from diloco_run import (
    Peers,
    asked,
    equal,
    go,
    less,
    made,
    make,
    mean,
    outer_step,
    shown,
    tell,
    trained,
    went,
)
from hypothesis import given
from hypothesis import strategies as st
from programs import diloco_member as member
from programs.diloco_member import Model, fresh
from workers import Run

from pccl.training.diloco.options import Options, Plan

MODES: list[dict[str, Any]] = [
    {"mode": "sync"},
    {"mode": "async", "overlap": 3},
    {"mode": "streaming", "fragments": 2, "overlap": 2},
]
NAMES = [mode["mode"] for mode in MODES]
TOKENS = 4


def warmed_up(every: int, numbers: list[int], rounds: int) -> Model:
    """The outer parameters after a warm-up of so many rounds, in one process.

    The meetings of a round are written out here; `Plan` computes them.
    """
    theta = fresh(0)
    velocity = {name: np.zeros_like(array) for name, array in theta.items()}
    for number in range(rounds):
        meetings = 10 if number < rounds / 7 else 5 if number < 3 * rounds / 7 else 2
        for _ in range(meetings):
            steps = every // meetings
            models = [trained(theta, one, steps) for one in numbers]
            gradients = mean([less(theta, one) for one in models], [float(TOKENS * steps)] * 2)
            if meetings > 2:
                theta = less(theta, gradients)
            else:
                outer_step(theta, velocity, gradients)
    return theta


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
def test_members_meet_more_often_at_first_bit_for_bit(run: Run, mode: dict[str, Any]) -> None:
    peers = Peers(run.peers(2, member.serve))
    make(peers, seed=0, sync_every=10, warm_up=7, **mode)
    made(peers)
    first = go(peers, 7, tokens=TOKENS)
    tell(peers, member.show_steps)
    assert [peer.expect("steps")["steps"] for peer in peers] == [10, 10]
    assert [one["round"] for one in first[0]] == list(range(1, 8))
    assert equal(shown(peers), warmed_up(10, [0, 1], 7))
    go(peers, 2, tokens=TOKENS, inner=mode["mode"] == "sync")


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
def test_a_newcomer_of_a_warm_up_holds_what_all_hold(run: Run, mode: dict[str, Any]) -> None:
    options = {"sync_every": 10, "warm_up": 14, **mode}
    peers = Peers(run.peers(2, member.serve))
    make(peers, seed=0, **options)
    made(peers)
    go(peers, 1)
    late = Peers([run.peer(member.serve)])
    make(late, 2, **options)
    asked(late[0])
    everybody = [*peers, *late]
    tell(everybody, partial(member.go, 16, until=3))
    assert made(late)[0]["round"] < 14
    went(everybody, inner=False)
    shown(everybody)


def test_a_member_that_is_killed_in_a_warm_up_is_missed_by_nobody(run: Run) -> None:
    peers = Peers(run.peers(3, member.serve))
    make(peers, seed=0, sync_every=10, warm_up=7)
    made(peers)
    tell(peers[2:], partial(member.go, 9, die=25))  # in the third round
    logs = go(peers[:2], 8)
    assert [log[-1]["round"] for log in logs] == [8, 8]
    shown(peers[:2])


@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.sampled_from([1, 2, 4]),
)
def test_rounds_end_where_they_end_without_a_warm_up(
    every: int, rounds: int, fragments: int
) -> None:
    names = list("abcd")
    mode = {"mode": "streaming", "fragments": min(fragments, every)} if every > 1 else {}
    plan = Plan.of(Options(every, warm_up=rounds, **mode), names, [1] * 4)  # type: ignore[arg-type]
    everything = list(range(len(plan.fragments)))
    met = []
    for number in range(rounds):
        steps = range(number * every + 1, (number + 1) * every + 1)
        leaving = [plan.leaving(step) for step in steps]
        assert leaving[-1] == everything
        assert all(fragments in ([], everything) for fragments in leaving)
        assert all(map(plan.warms_up, steps))
        met.append(sum(map(bool, leaving)))
    for number, reductions in enumerate(met):
        share = Fraction(number, rounds)
        usual = 10 if share < Fraction(1, 7) else 5 if share < Fraction(3, 7) else 2
        assert reductions == min(usual, every)
    assert not plan.warms_up(rounds * every + 1)
    assert not plan.is_plain(rounds * every) or rounds <= 2
