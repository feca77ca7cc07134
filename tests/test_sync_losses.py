"""Members that are lost, interrupted or late during `pccl.sync`, and what the others are told."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial

import pytest
from programs import sync_faults, sync_shell
from syncs import (
    MIB,
    Peers,
    agreed,
    arange,
    do,
    failed,
    full,
    interrupted,
    members,
    moved,
    newcomer,
    noise,
    ones,
    put,
    sync,
    synced,
    tell,
    whether_equal,
    zeros,
)
from workers import FAST, Run, Worker, running, wait_until_asleep, wait_until_stopped

# 512 MiB, of which a newcomer's ones differ everywhere.
BIG = 512 * MIB
LARGE = arange(sync_faults.BIG)


def strike(
    late: Sequence[Worker], number: int, pid: int | None = None, *, freeze: bool = False
) -> None:
    """Has the newcomer sync, and strike once in the middle of the transfer."""
    tell(late, partial(sync_faults.sync_and_strike, number, pid, freeze))


def hold_rank(peers: Sequence[Worker], count: int = 1000) -> None:
    for rank, peer in enumerate(peers):
        tell([peer], partial(sync_shell.hold, full(count, rank)))


def hold_theirs(peers: Sequence[Worker], count: int = 1000) -> list[dict[str, bool]]:
    """Whether each has still what hold_rank gave it."""
    answers = []
    for rank, peer in enumerate(peers):
        answers += do([peer], partial(sync_shell.say_whether_all, rank))
    return answers


def test_a_newcomer_or_a_holder_killed_during_the_transfer_costs_the_others_nothing(
    run: Run,
) -> None:
    peers, doomed, late = members(run, 3), newcomer(run), newcomer(run)
    held = synced(peers, sync(LARGE))[0]["digest"]
    strike(doomed, signal.SIGKILL)
    sent = 0
    while doomed[0].process.poll() is None:
        tell(peers, sync())
        answers = agreed(peers, all_live=False)
        assert moved(answers) == [0, 0, 0]
        sent += sum(answer["tx"] for answer in answers)
    assert doomed[0].ends() == -signal.SIGKILL
    assert 0 < sent <= BIG
    assert synced(peers, sync())[0]["size"] == 3
    # The one that everybody asks first.
    strike(late, signal.SIGKILL, peers[0].pid)
    tell(peers, sync(until=late.ids[0]))
    left = peers[1:] + late
    answers = agreed(left, all_live=False)
    assert peers[0].ends() == -signal.SIGKILL
    assert moved(answers) == [0, 0, BIG]
    assert (answers[0]["size"], answers[0]["digest"]) == (3, held)
    assert moved(synced(left, sync())) == [0, 0, 0]


@pytest.mark.env(**FAST)
def test_a_holder_that_freezes_during_the_transfer_is_replaced(run: Run) -> None:
    peers, late = members(run, 2), newcomer(run)
    held = synced(peers, sync(LARGE))[0]["digest"]
    strike(late, signal.SIGSTOP, peers[0].pid)
    tell(peers, sync(until=late.ids[0]))
    left = peers[1:] + late
    answers = agreed(left, all_live=False)
    assert moved(answers) == [0, BIG]
    assert (answers[0]["size"], answers[0]["digest"]) == (2, held)
    peers[0].signal(signal.SIGCONT)
    assert failed(peers[0].next(), "Evicted")["advice"] == "rejoin"
    # In the same process.
    tell(peers[:1], sync_shell.rejoin)
    again = Peers(peers[:1])
    tell(again, put(5, value=5), put(7, value=0), sync())
    tell(left, sync(until=again.ids[0]))
    assert moved(agreed(left + again)) == [0, 0, MIB]


def test_a_state_whose_last_holder_is_lost_is_not_made_up(run: Run) -> None:
    peers, late = members(run, 1), newcomer(run)
    synced(peers, sync(LARGE))
    tell(peers, sync(until=2))
    strike(late, signal.SIGKILL, peers[0].pid)
    answer = late[0].next()
    assert failed(answer, "StateUnavailable", "NO_SHARED_STATE_AVAILABLE")["advice"] == "stop"
    assert do(late, partial(sync_shell.say_whether_all, 1)) == [{"same": True}]
    # A checkpoint may take its place.
    assert synced(late, sync(revision=5))[0]["revision"] == 5
    assert synced(late, sync_shell.sync_given)[0]["revision"] == 6


def test_ctrl_c_during_the_transfer_ends_the_sync_for_all_and_nothing_is_written(run: Run) -> None:
    peers, late = members(run, 2), newcomer(run)
    held = synced(peers, sync(LARGE))[0]["digest"]

    def gave_up(who: Worker) -> None:
        for peer in peers + late:
            if peer is not who:
                told = failed(peer.next(), "PeerLost", "RANK_CONNECTION_LOST")
                assert told["advice"] == "retry"
        assert do(late, partial(sync_shell.say_whether_all, 1)) == [{"same": True}]
        assert do(late, sync_shell.say_whether_given) == [{"same": True}]
        assert do(peers, sync_shell.say_digest) == [{"digest": held}] * 2

    strike(late, signal.SIGINT)
    tell(peers, sync(until=3))
    interrupted(late[0].next())
    gave_up(late[0])
    # The newcomer interrupts a member, and freezes until that has had its effect.
    strike(late, signal.SIGINT, peers[1].pid, freeze=True)
    tell(peers, sync(until=3))
    wait_until_stopped(late[0])
    interrupted(peers[1].next(5))
    late[0].signal(signal.SIGCONT)
    gave_up(peers[1])
    # The next one succeeds, and reports its progress.
    answers = synced(peers + late, sync_faults.sync_and_report)
    assert (moved(answers), answers[0]["size"], answers[0]["digest"]) == ([0, 0, BIG], 3, held)
    calls = do(late, sync_faults.say_calls)[0]["calls"]
    assert calls == sorted(calls)
    assert 0 <= calls[0][0] <= calls[-1][0] == BIG
    assert {wanted for _, wanted in calls} == {BIG}
    assert do(peers, sync_faults.say_calls) == [{"calls": []}] * 2  # they received nothing


def test_ctrl_c_that_comes_when_the_state_is_in_spoils_it_for_nobody(run: Run) -> None:
    peers, late = members(run, 2), newcomer(run)
    held = synced(peers, sync({"n": 7, "w": noise(1, 1000)}))[0]["digest"]
    tell(late, partial(sync_faults.sync_and_strike_at_the_end, 2))
    tell(peers, sync(until=3))
    interrupted(late[0].next())
    assert [peer.expect("synced")["digest"] for peer in peers] == [held] * 2
    arrived = partial(sync_faults.say_whether_mine_is, noise(1, 1000))
    assert do(late, arrived) == [{"same": True}]
    # The entry that could not be returned comes again.
    answers = synced(peers + late, sync())
    assert (moved(answers), answers[0]["digest"]) == ([0, 0, 1], held)


def test_ctrl_c_in_a_waiting_sync_ends_it_for_all(run: Run) -> None:
    peers = members(run, 2)
    hold_rank(peers)
    tell(peers[:1], sync(announce=True))
    peers[0].expect("calling")
    wait_until_asleep(peers[0])
    peers[0].signal(signal.SIGINT)
    interrupted(peers[0].next())
    tell(peers[1:], sync())
    failed(peers[1].next(), "PeerLost", "RANK_CONNECTION_LOST")
    assert hold_theirs(peers) == [{"same": True}] * 2
    assert moved(synced(peers, sync())) == [0, 8000]


def test_ctrl_c_and_deadlines_end_the_sync_for_all_also_while_the_state_is_hashed(run: Run) -> None:
    peers = members(run, 2)
    synced(peers, sync(zeros(3)))
    tell(peers[:1], partial(sync_faults.sync_huge, timeout=0.3))
    told = failed(peers[0].next(), "Timeout")
    assert "hashed" in told["text"]
    failed(do(peers[1:], sync())[0], "Timeout")
    tell(peers[1:], sync())
    tell(peers[:1], partial(sync_faults.sync_huge_and_interrupt, 0.2))
    interrupted(peers[0].next())
    failed(peers[1].next(), "PeerLost", "RANK_CONNECTION_LOST")
    assert moved(synced(peers, sync())) == [0, 0]


def test_ctrl_c_in_the_moment_in_which_newcomers_are_let_in_ends_the_sync_for_all() -> None:
    for newcomers in (0, 1):
        with running() as run:
            peers = members(run, 2)
            synced(peers, sync(zeros(3)))
            tell(peers[:1], sync_shell.interrupt_on_signal)
            late = newcomer(run, newcomers)
            tell(late, sync(ones(3)))
            tell(peers[:1], sync(announce=True))
            peers[0].expect("calling")
            wait_until_asleep(peers[0])
            peers[0].signal(signal.SIGUSR1)
            peers[0].expect("interrupted")
            tell(peers[1:], sync(announce=True))
            peers[1].expect("calling")
            wait_until_asleep(peers[1])  # the round before is decided, and it waits in the next
            peers[0].tell("go on")
            interrupted(peers[0].next())
            for peer in [*peers[1:], *late]:
                failed(peer.next(), "PeerLost", "RANK_CONNECTION_LOST")
            tell(late, sync(ones(3)))
            tell(peers, sync())
            assert agreed(peers + late)[0]["size"] == 2 + newcomers


def test_a_deadline_ends_the_sync_for_all(run: Run) -> None:
    peers = members(run, 2)
    hold_rank(peers)
    failed(do(peers[:1], sync(timeout=0.3))[0], "Timeout")
    failed(do(peers[1:], sync())[0], "Timeout")
    assert hold_theirs(peers) == [{"same": True}] * 2
    assert moved(synced(peers, sync(timeout=20))) == [0, 8000]


def test_a_newcomers_sync_waits_to_be_let_in_and_can_be_ended(run: Run) -> None:
    peers = members(run, 1)
    synced(peers, sync(zeros(1000)))
    late = newcomer(run)
    failed(do(late, sync(ones(1000), timeout=0.3))[0], "Timeout")
    tell(late, sync(announce=True))
    late[0].expect("calling")
    wait_until_asleep(late[0])
    late[0].signal(signal.SIGINT)
    interrupted(late[0].next())
    assert do(late, whether_equal(ones(1000))) == [{"same": True}]
    tell(late, sync())
    tell(peers, sync(until=2))
    assert moved(agreed(peers + late)) == [0, 8000]


def test_members_do_not_wait_for_a_newcomer_that_gave_up_waiting(run: Run) -> None:
    peers = members(run, 1)
    synced(peers, sync(zeros(1000)))
    late = newcomer(run)
    failed(do(late, sync(ones(1000), timeout=0.3))[0], "Timeout")
    tell(peers, sync())
    assert agreed(peers, timeout=4)[0]["size"] == 1


def test_sync_and_allreduce_cannot_meet(run: Run) -> None:
    peers = members(run, 2)
    hold_rank(peers)
    tell(peers[:1], sync())
    tell(peers[1:], sync_shell.reduce_or_fail)
    told = [
        failed(peers[0].next(), "Deadlock"),
        failed(peers[1].next(), "Deadlock", "RANK_CONNECTION_LOST"),
    ]
    assert told[0]["waiting"] == told[1]["waiting"]
    for word in ("sync", peers.names[0], "allreduce", peers.names[1]):
        assert word in told[0]["text"]
    # The other call is covered: whoever comes to it gets the error too, once.
    failed(do(peers[:1], sync_shell.reduce_or_fail)[0], "Deadlock", "RANK_CONNECTION_LOST")
    failed(do(peers[1:], sync())[0], "Deadlock")
    assert moved(synced(peers, sync())) == [0, 8000]
    assert do(peers, sync_shell.reduce_or_fail) == [{"event": "reduced"}] * 2
    assert len(told[0]["waiting"]) == 2  # a line per member
