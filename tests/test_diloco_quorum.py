"""DiLoCo's rounds that do not wait for members that are late, and what those have learned."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from diloco_run import (
    Peers,
    asked,
    close,
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
from programs import diloco_member as member
from programs.diloco_member import fresh
from workers import Run

import pccl
from pccl import diloco

QUORUM: dict[str, Any] = {
    "sync_every": 3,
    "quorum": 0.75,
    "grace_seconds": 0.3,
    "rejoin": "told",
}


def comes_back_late(peers: Peers, missed: int = 1, **options: Any) -> list[int]:
    """The last one misses rounds, comes to the end of its own, and is back in a later one.

    Returns the numbers of members that contributed to each round since it was late.
    """
    late, others = peers[-1:], peers[:-1]
    log = go(others, missed, inner=False, **options)[0]
    assert log[-1]["size"] == len(others)
    tell(late, partial(member.go, 1, until=len(peers), **options))
    late[0].expect("back")
    asked(late[0])
    tell(others, partial(member.go, 1, until=len(peers), **options))
    log += went(peers, inner=False)[0]
    return [len(one["contributors"]) for one in log]


@pytest.mark.parametrize("tokens", [None, 8])
def test_what_a_late_member_has_learned_counts_in_the_next_round(
    run: Run, tokens: int | None
) -> None:
    peers = Peers(run.peers(4, member.serve))
    make(peers, seed=0, **QUORUM)
    made(peers)
    go(peers, 1, tokens=tokens)
    counts = comes_back_late(peers, tokens=tokens)

    theta = fresh(0)
    velocity = {name: np.zeros_like(array) for name, array in theta.items()}

    def learned(number: int) -> member.Model:
        return less(theta, trained(theta, number, 3))

    outer_step(theta, velocity, mean([learned(number) for number in range(4)]))
    late = learned(3)
    assert counts == [*[3] * (len(counts) - 2), 4, 4]
    for count in counts[:-1]:
        parts = [learned(number) for number in range(3)]
        outer_step(theta, velocity, mean(parts if count == 3 else [*parts, late]))
    outer_step(theta, velocity, mean([learned(number) for number in range(4)]))
    assert close(shown(peers), theta)


@pytest.mark.parametrize("mode", ["async", "streaming"])
def test_members_agree_in_every_mode(run: Run, mode: str) -> None:
    peers = Peers(run.peers(4, member.serve))
    make(peers, mode=mode, **QUORUM)
    made(peers)
    go(peers, 1, inner=False)
    # The end of the next round tells who was in one that nobody waits for.
    assert comes_back_late(peers, missed=2)[-1] == 4
    shown(peers)


REFUSED: dict[str, dict[str, Any]] = {
    "above 0.5": {"quorum": 0.5},
    "at most 1": {"quorum": 1.5},
    "quorum is a number": {"quorum": "most"},
    "grace_seconds is from 0": {"grace_seconds": -1},
    "grace_seconds is a number": {"grace_seconds": True},
    "grace_seconds needs a quorum": {"quorum": None},
    "needs rejoin": {"rejoin": None},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_makes_no_sense_is_refused(words: str) -> None:
    options = {"sync_every": 3, "quorum": 0.75, "grace_seconds": 1, "rejoin": pccl.init}
    with pytest.raises(pccl.InvalidArgument, match=words):
        diloco.DiLoCo({"w": np.zeros(3, np.float32)}, join=False, **{**options, **REFUSED[words]})
