"""DiLoCo while members come, are killed, are put out and come back."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import pytest
from diloco_run import (
    MODES,
    MORE,
    Peers,
    asked,
    close,
    equal,
    go,
    how,
    made,
    make,
    reference,
    shown,
    tell,
    went,
)
from programs import diloco_member as member
from workers import FAST, Run

from pccl import _core


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 2])
def test_newcomers_get_what_the_members_have_and_count_from_their_first_round(
    run: Run, mode: str, count: int
) -> None:
    peers = Peers(run.peers(1, member.serve))
    make(peers, seed=0, sync_every=4, mode=mode)
    made(peers)
    go(peers, 2, inner=mode == "sync")
    late = Peers([run.peer(member.serve) for _ in range(count)])
    make(late, 1, sync_every=4, mode=mode)
    for worker in late:
        asked(worker)  # so that they enter together
    size = 1 + count
    tell(peers, partial(member.go, 3, until=size))
    assert {one["round"] for one in made(late)} == {3}
    tell(late, partial(member.go, 3, until=size))
    last = went([*peers, *late], inner=mode == "sync")[-1][-1]["round"]
    alone, together = [[0]] * 3, [list(range(size))] * (last - 3)
    found, want = shown([*peers, *late]), reference(mode, 4, alone + together)
    assert equal(found, want) if size == 2 else close(found, want)


@pytest.mark.parametrize("mode", MODES)
def test_newcomers_come_while_members_run_and_everybody_agrees(run: Run, mode: str) -> None:
    peers = Peers(run.peers(2, member.serve))
    make(peers, seed=0, sync_every=5, mode=mode)
    made(peers)
    tell(peers, partial(member.go, 4, until=5))
    late = Peers([run.peer(member.serve) for _ in range(3)])
    make(late, 2, sync_every=5, mode=mode)
    tell(late, partial(member.go, 4, until=5))
    entered = {number: one["round"] for number, one in enumerate(made(late), 2)}
    logs = went([*peers, *late], inner=mode == "sync")
    everybody = [
        [0, 1] + [number for number, at in entered.items() if at < round]
        for round in range(1, logs[0][-1]["round"] + 1)
    ]
    assert close(shown([*peers, *late]), reference(mode, 5, everybody))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [2, 5])
def test_a_member_that_is_killed_costs_the_others_nothing(run: Run, mode: str, steps: int) -> None:
    # Killed in its second inner step, and in async with its first reduction under way.
    peers = Peers(run.peers(3, member.serve))
    make(peers, seed=0, sync_every=4, mode=mode)
    made(peers)
    tell(peers[:2], partial(member.go, 4))
    tell(peers[2:], partial(member.go, 4, die=steps))
    log = went(peers[:2], inner=mode == "sync")[0]
    assert log[-1]["size"] == 2
    # An info tells of the reduction that was applied last: of the round before, in async.
    applied = [one["contributors"] for one in log]
    if mode == "async":
        applied = [*applied[1:], peers.ids[:2]]
    took_part = [[peers.ids.index(peer) for peer in ids] for ids in applied]
    assert all(sorted(ids)[:2] == [0, 1] for ids in took_part)
    assert close(shown(peers[:2]), reference(mode, 4, took_part))


@pytest.mark.parametrize("mode", MORE)
def test_a_member_is_killed_in_the_round_that_lets_newcomers_in(run: Run, mode: str) -> None:
    # After the newcomers have the state, before its own part of the reduction begins.
    peers = Peers(run.peers(2, member.serve))
    make(peers, seed=0, sync_every=4, **how(mode))
    made(peers)
    inner = mode == "sync"
    go(peers, 2, inner=inner)
    late = Peers([run.peer(member.serve) for _ in range(2)])
    make(late, 2, sync_every=4, **how(mode))
    for worker in late:
        asked(worker)
    tell(peers[1:], member.die_in_the_first_reduction_of_three)
    tell([*peers, *late], partial(member.go, 2, until=3))
    entered = {number: one["round"] for number, one in enumerate(made(late), 2)}
    logs = went([peers[0], *late], inner=inner)
    assert logs[0][-1]["size"] == 3
    found = shown([peers[0], *late])
    if mode in MODES:
        took_part = [
            [0]
            + [1] * (round < min(entered.values()))
            + [number for number, at in entered.items() if at < round]
            for round in range(1, logs[0][-1]["round"] + 1)
        ]
        assert close(found, reference(mode, 4, took_part))


@pytest.mark.parametrize("mode", MORE)
def test_newcomers_go_on_when_all_that_counted_are_killed(run: Run, mode: str) -> None:
    peers = Peers(run.peers(1, member.serve))
    make(peers, seed=0, sync_every=4, **how(mode))
    made(peers)
    go(peers, 2, inner=mode == "sync")
    late = Peers([run.peer(member.serve) for _ in range(2)])
    make(late, 1, sync_every=4, **how(mode))
    for worker in late:
        asked(worker)
    tell(peers, member.die_in_the_next_reduction)
    tell(peers, partial(member.go, 3))
    made(late)
    go(late, 2, inner=mode == "sync")
    found = shown(late)
    if mode in MODES:
        # Nobody's pseudo-gradient of the third round is left.
        assert equal(found, reference(mode, 4, [[0], [0], [], [1, 2], [1, 2]]))


@pytest.mark.parametrize(
    ("mode", "overlap"),
    [
        *(({"mode": "streaming", "fragments": 3}, overlap) for overlap in (0, 1, 5, 7)),
        ({"mode": "async"}, 1),
        ({"mode": "async"}, 7),
    ],
)
def test_newcomers_enter_between_reductions_in_flight(
    run: Run, mode: dict[str, Any], overlap: int
) -> None:
    peers = Peers(run.peers(2, member.serve))
    options = mode | {"sync_every": 8, "overlap": overlap, "verify_every": 1}
    make(peers, seed=0, **options)
    made(peers)
    go(peers, 2, inner=False)
    late = Peers([run.peer(member.serve) for _ in range(2)])
    make(late, 2, **options)
    # A comparison each round, in which all have the same, what is in flight included.
    tell([*peers, *late], partial(member.go, 4, until=4))
    made(late)
    logs = went([*peers, *late], inner=False)
    assert logs[0][-1]["size"] == 4
    tell(peers, member.show_diverged)
    assert [peer.expect("diverged")["who"] for peer in peers] == [[], []]
    shown([*peers, *late])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync_every": 5}, ["sync_every=5", "sync_every=3"]),
        (
            {"sync_every": 3, "quantize": "int8"},
            ["reduced as int8 (min_max)", "reduced exactly"],
        ),
        (
            {"sync_every": 3, "sparse": {"density": 0.25}},
            ["reduced sparse (density=0.25, chunk=4096, decay=0.95)", "reduced exactly"],
        ),
    ],
)
def test_a_newcomer_with_other_settings_is_told(
    run: Run, options: dict[str, Any], words: list[str]
) -> None:
    peers = Peers(run.peers(1, member.serve))
    make(peers, sync_every=3)
    made(peers)
    late = run.peer(member.serve)
    late.expect("in")
    tell([late], partial(member.make_what_is_refused, 1, **options))
    asked(late)
    tell(peers, partial(member.go, 3))
    text = late.expect("refused")["text"]
    assert all(word in text for word in words), text
    went(peers)  # though that process lives


@pytest.mark.env(**FAST)
def test_a_member_that_was_put_out_comes_back_by_itself(run: Run) -> None:
    peers = Peers(run.peers(3, member.serve))
    make(peers, sync_every=3, mode="async", rejoin="init")
    made(peers)
    go(peers, 2, inner=False, tokens=8)
    peers[2].signal(signal.SIGSTOP)
    try:
        # Without it: the others wait for it until it counts as dead.
        logs = go(peers[:2], 2, inner=False, tokens=8)
        assert logs[0][-1]["size"] == 2
    finally:
        peers[2].signal(signal.SIGCONT)
    tell(peers[2:], member.forget_info)  # of a reduction of three, before it froze
    tell(peers, partial(member.go, 2, until=3, tokens=8))
    assert went(peers, inner=False)[0][-1]["size"] == 3


@pytest.mark.env(**FAST)
def test_a_member_that_is_ahead_of_a_run_that_began_again_goes_back_with_it(run: Run) -> None:
    peers = Peers(run.peers(2, member.serve))
    make(peers, sync_every=3, rejoin="init")
    made(peers)
    go(peers, 2, tokens=8)
    peers[1].signal(signal.SIGSTOP)
    try:
        go(peers[:1], 1, tokens=8)
        tell(peers[:1], member.begin_again)
        assert made(peers[:1])[0]["round"] == 0
    finally:
        peers[1].signal(signal.SIGCONT)
    tell(peers[1:], member.forget_info)
    tell(peers, partial(member.go, 2, until=2, tokens=8))
    assert went(peers)[1][-1]["size"] == 2


def replicas(run: Run) -> Peers:
    """Two replicas of one rank each."""
    programs = {
        name: partial(member.serve, replica_id=name, ranks_per_replica=1, min_peers=2)
        for name in "ab"
    }
    return Peers([run.peer(program, PCCL_NAME=name) for name, program in programs.items()])


@pytest.mark.env(**FAST)
def test_a_rank_of_a_replica_does_not_come_back_alone(run: Run) -> None:
    peers = replicas(run)
    make(peers, sync_every=3, rejoin="init")
    made(peers)
    go(peers, 1)
    peers[1].signal(signal.SIGSTOP)
    try:
        go(peers[:1], 2)
    finally:
        peers[1].signal(signal.SIGCONT)
    tell(peers[1:], member.go_although_put_out)
    assert peers[1].expect("told")["advice"] == "rejoin"


def test_a_rank_of_a_replica_does_not_come_back_alone_as_it_joins(run: Run) -> None:
    peers = replicas(run)
    make(peers, sync_every=3, rejoin="told", join=False)
    made(peers)
    _core.command(run.address, "kick", "b")
    tell(peers[1:], member.join_although_put_out)
    assert peers[1].expect("told")["advice"] == "rejoin"


@pytest.mark.parametrize("where", ["_look", "_reduce", "_announce"])  # at first, where all meet ...
@pytest.mark.parametrize("rejoin", [None, "start"])
def test_a_member_interrupted_in_a_step_has_to_leave_first(
    run: Run, rejoin: str | None, where: str
) -> None:
    peers = Peers(run.peers(2, member.serve))
    make(peers, sync_every=3, rejoin=rejoin)
    made(peers)
    go(peers, 1)
    tell(peers[:1], partial(member.be_interrupted_in_a_step, where))
    tell(peers[1:], member.forget_info)
    tell(peers[1:], partial(member.go, 2, until=2))
    if rejoin is None:
        assert "pccl.init(), then join()" in peers[0].expect("told")["text"]
    peers[0].expect("back", 60)
    logs = [peer.expect("went", 60)["log"] for peer in peers]
    assert logs[0][-1]["outer"] == logs[1][-1]["outer"]


@pytest.mark.parametrize("where", ["_pin", "_reduce"])  # right after the sync, and later
def test_a_newcomer_interrupted_while_it_joins_has_to_leave_first(run: Run, where: str) -> None:
    peers = Peers(run.peers(2, member.serve))
    make(peers, sync_every=3)
    made(peers)
    go(peers, 1)
    late = Peers([run.peer(member.serve)])
    tell(late, partial(member.be_interrupted_while_joining, 2, where, sync_every=3))
    made(late)
    asked(late[0])
    tell(peers, partial(member.go, 2, until=3))
    assert "pccl.init(), then join()" in late[0].expect("told", 60)["text"]
    tell(peers, member.forget_info)
    late[0].expect("back", 60)
    went([*peers, *late])


def test_another_object_of_an_interrupted_communicator_is_refused(run: Run) -> None:
    peers = Peers(run.peers(2, member.serve))
    make(peers, sync_every=3)
    made(peers)
    go(peers, 1)
    tell(peers[:1], partial(member.be_interrupted_and_make_another, sync_every=3))
    tell(peers[1:], member.forget_info)
    tell(peers[1:], partial(member.go, 2, until=2))
    assert "interrupted in the middle of a step" in peers[0].expect("told", 60)["text"]
    peers[0].expect("back", 60)
    went(peers)


def test_join_comes_back_after_a_return_that_failed(run: Run) -> None:
    names = {name: {"PCCL_NAME": name, "PCCL_MIN_PEERS": "2"} for name in ("stays", "goes")}
    peers = Peers([run.peer(member.serve, **env) for env in names.values()])
    make(peers, sync_every=3, rejoin="second try")
    made(peers)
    go(peers, 1)
    tell(peers[:1], member.forget_info)
    tell(peers[:1], partial(member.go, 2, until=2))
    _core.command(run.address, "kick", "goes")
    tell(peers[1:], member.fail_to_come_back)
    peers[1].expect("failed", 60)
    peers[1].expect("back", 60)
    went(peers)
    _core.command(run.address, "kick", "goes")
    tell(peers[:1], member.forget_info)
    tell(peers[:1], partial(member.go, 2, until=2))
    peers[1].tell("join")
    peers[1].expect("back", 60)
    went(peers)


def test_without_rejoin_the_exception_says_so_and_join_comes_back(run: Run) -> None:
    peers = Peers(run.peers(2, member.serve))
    make(peers, sync_every=3)
    made(peers)
    go(peers, 1)
    tell(peers[1:], member.close_and_join_again)
    tell(peers[:1], member.forget_info)
    tell(peers[:1], partial(member.go, 2, until=2))
    assert peers[1].expect("failed")["kind"] == "NotInitialized"
    assert "join()" in peers[1].expect("failed")["kind"]
    went(peers)
