"""Rounds that end by their time: members of different speed make different numbers of steps."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diloco_run import (
    Peers,
    asked,
    close,
    equal,
    go,
    less,
    made,
    mean,
    outer_step,
    shown,
    tell,
    trained,
    went,
)
from programs import diloco_data as data
from programs import diloco_member as member
from programs.diloco_member import Model, fresh
from workers import Run, running

import pccl
from pccl import diloco
from pccl.training.diloco.options import Options, Plan

# Seconds of an inner step, and how many of them end nearest to 12 seconds, at most 8.
PACES, STEPS = (1.0, 2.0, 5.0), (8, 6, 2)
TIMED: dict[str, Any] = {"sync_every": 8, "round_seconds": 12}


def reference(rounds: Sequence[Sequence[int]], *, ahead: bool = False) -> Model:
    """The outer parameters after these rounds, each of which has the members' numbers of steps.

    `ahead`: a mean is applied a round after it was measured, as in "async" with the longest
    overlap.
    """
    theta = fresh(0)
    velocity = {name: np.zeros_like(array) for name, array in theta.items()}
    begun = [theta] * len(rounds[0])
    flying: Model | None = None
    for steps in rounds:
        ends = [trained(begun[own], own, count) for own, count in enumerate(steps)]
        gradients = [less(*pair) for pair in zip(begun, ends, strict=True)]
        result: Model | None = mean(gradients, [count / 8 for count in steps])
        if ahead:
            result, flying = flying, result
        if result is not None:
            outer_step(theta, velocity, result)
        begun = ends if ahead else [theta] * len(steps)
        if ahead and result is not None:
            begun = [less(theta, gradient) for gradient in gradients]
        theta = {name: array.copy() for name, array in theta.items()}
    return theta


def paced(peers: Peers, paces: Sequence[float] = PACES, **options: Any) -> None:
    for number, (peer, pace) in enumerate(zip(peers, paces, strict=True)):
        tell([peer], partial(member.make, number, seed=0, pace=pace, **TIMED, **options))
    made(peers)


def test_each_member_makes_the_steps_that_fit_and_weighs_by_them(run: Run) -> None:
    peers = Peers(run.peers(3, member.serve))
    paced(peers)
    logs = go(peers, 4)
    assert [one["round"] for one in logs[0]] == [1, 2, 3, 4]
    assert [peer.expect("steps")["steps"] for peer in told_steps(peers)] == list(STEPS)
    assert close(shown(peers), reference([STEPS] * 4))


def told_steps(peers: Peers) -> Peers:
    tell(peers, member.show_steps)
    return peers


def test_two_members_are_bit_for_bit_what_one_process_computes(run: Run) -> None:
    peers = Peers(run.peers(2, member.serve))
    paced(peers, PACES[:2])
    go(peers, 4)
    assert equal(shown(peers), reference([STEPS[:2]] * 4))


def test_a_mean_comes_a_round_later_in_async(run: Run) -> None:
    peers = Peers(run.peers(2, member.serve))
    paced(peers, PACES[1:], mode="async")
    go(peers, 5, inner=False)
    assert close(shown(peers), reference([STEPS[1:]] * 5, ahead=True))


def test_fragments_take_turns_of_equal_time_in_streaming(run: Run) -> None:
    fragments = [["a", "d"], ["b", "c", "e"]]
    names = [[f"['{name}']" for name in fragment] for fragment in fragments]
    peers = Peers(run.peers(3, member.serve))
    paced(peers, mode="streaming", fragments=names, overlap=0, mixing=0.0)
    go(peers, 4, inner=False)
    assert [peer.expect("steps")["steps"] for peer in told_steps(peers)] == list(STEPS)
    # The second fragment's first turn comes in the middle of the first round.
    first, second = reference([STEPS] * 4), reference([(4, 3, 1), *[STEPS] * 3])
    assert close(shown(peers), first | {name: second[name] for name in fragments[1]})


def test_a_member_too_slow_for_the_overlap_applies_the_mean_at_its_rounds_end(run: Run) -> None:
    # Due after four steps; the slowest member makes two.
    peers = Peers(run.peers(3, member.serve))
    paced(peers, mode="async", overlap=4)
    logs = go(peers, 5, inner=False)
    assert [one["round"] for one in logs[2]] == [1, 2, 3, 4, 5]
    tell(peers, member.finish)
    assert all(peer.expect("same")["same"] for peer in peers)


@pytest.mark.parametrize("mode", ["sync", "async", "streaming"])
def test_newcomers_and_losses_with_rounds_of_uneven_steps(run: Run, mode: str) -> None:
    inner = mode == "sync"
    peers = Peers(run.peers(2, member.serve))
    paced(peers, PACES[:2], mode=mode)
    go(peers, 2, inner=inner)
    late = Peers([run.peer(member.serve) for _ in range(2)])
    for number, (peer, pace) in enumerate(zip(late, PACES[1:], strict=True), 2):
        tell([peer], partial(member.make, number, pace=pace, mode=mode, **TIMED))
    for peer in late:
        asked(peer)
    # The second one is killed in the middle of the round at whose end newcomers enter.
    tell(peers[1:], partial(member.go, 2, die=3))
    tell([peers[0], *late], partial(member.go, 4, until=3))
    made(late)
    logs = went([peers[0], *late], inner=inner)
    assert logs[0][-1]["round"] == logs[1][-1]["round"] == logs[2][-1]["round"]


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"mode": "async"},
        {"mode": "async", "overlap": 6},
        {"compression": "sparse"},
        {"mode": "async", "background_join": True},
        data.TURNS,
        {**data.TURNS, "background_join": True},
    ],
)
def test_each_example_is_learned_from_once(run: Run, mode: dict[str, Any]) -> None:
    counts = partial(data.count_unevenly, mode=mode)
    peers = [
        run.peer(partial(counts, own, pace=pace, dies_at=dies_at), PCCL_MIN_PEERS="3")
        for own, pace, dies_at in ((0, 1.0, -1), (1, 2.0, -1), (2, 4.0, 3))
    ]
    for peer in peers:
        peer.expect("in", 60)
    assert peers[2].ends() == -signal.SIGKILL
    late = run.peer(partial(counts, 3, pace=4.0))
    late.expect("in", 60)
    ends = [peer.expect("done", 60) for peer in (*peers[:2], late)]
    # At least one in each turn of a fragment.
    assert [end["steps"] for end in ends] == [6, 3, 2 if "fragments" in mode else 1]
    assert len({end["committed"] for end in ends}) == 1
    assert all(end["due"] == ends[0]["due"] for end in ends)
    if "compression" not in mode:  # what codes leave out is each member's own
        assert all(end["counts"] == end["due"] for end in ends)
        assert sum(ends[0]["counts"]) == ends[0]["committed"] >= 1500


@pytest.mark.parametrize("then", [{"mode": "async", "overlap": 6}, {}, {"round_seconds": None}])
def test_a_checkpoint_has_what_was_in_flight(then: dict[str, Any], tmp_path: Path) -> None:
    counts = partial(data.count_unevenly, 0, pace=2.0, members=1, path=str(tmp_path / "checkpoint"))
    with running() as run:
        before = partial(counts, mode={"mode": "async", "overlap": 6}, saves_at=5)
        assert run.peer(before).ends() == 0
    with running() as run:
        peer = run.peer(partial(counts, mode=then))
        peer.expect("in", 60)
        end = peer.expect("done", 60)
    assert end["counts"] == end["due"]
    assert sum(end["counts"]) == end["committed"] >= 1500


def test_a_member_that_takes_nothing_reserves_as_the_others_do(run: Run) -> None:
    counts = partial(data.count_unevenly, mode={}, members=2)
    peers = [
        run.peer(partial(counts, 0, pace=1.0), PCCL_MIN_PEERS="2"),
        run.peer(partial(counts, 1, pace=2.0, takes_from=4), PCCL_MIN_PEERS="2"),
    ]
    for peer in peers:
        peer.expect("in", 60)
    ends = [peer.expect("done", 60) for peer in peers]
    assert ends[0]["due"] == ends[0]["counts"] == ends[1]["counts"]
    assert ends[0]["received"] == ends[1]["received"] == 0


def test_what_makes_no_sense_is_refused() -> None:
    model = {"a": np.zeros(3, np.float32)}
    wrong: list[Any] = [0, -1.0, float("inf"), float("nan"), True, "5"]
    for seconds in wrong:
        with pytest.raises(pccl.InvalidArgument, match="positive number of seconds"):
            diloco.DiLoCo(model, sync_every=4, round_seconds=seconds, join=False)


def test_members_with_another_time_have_other_settings() -> None:
    plan = Plan.of(Options(sync_every=8, round_seconds=13), ["w"], [10])
    assert "round_seconds=13" in str(plan)


def test_a_rank_of_a_replica_is_refused(run: Run) -> None:
    peers = Peers(
        [
            run.peer(
                partial(member.serve, replica_id=name, ranks_per_replica=1, min_peers=2),
            )
            for name in "ab"
        ]
    )
    for number, peer in enumerate(peers):
        tell([peer], partial(member.make_what_is_refused, number, **TIMED))
    for peer in peers:
        assert "not for ranks of a replica" in peer.expect("refused", 60)["text"]
