"""`pccl.sync(overwrite=True)`: no second copy, and what that means when the sync fails."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial

import pytest
from programs import sync_faults, sync_shell
from syncs import (
    Peers,
    agreed,
    do,
    failed,
    full,
    interrupted,
    keeper,
    members,
    moved,
    newcomer,
    ones,
    put,
    sync,
    synced,
    tell,
    zeros,
)
from test_sync_losses import BIG, LARGE
from workers import FAST, Run, Worker

from pccl._state import State


def strike(late: Sequence[Worker], number: int, pid: int | None = None) -> None:
    tell(late, partial(sync_faults.sync_and_strike, number, pid, overwrite=True))


def test_a_newcomer_needs_no_memory_for_a_second_copy(run: Run) -> None:
    peers, late = members(run, 2), newcomer(run)
    held = synced(peers, sync({"a": ones(1 << 26), "z": 1}))[0]["digest"]
    tell(late, partial(sync_shell.hold, {"a": zeros(1 << 26), "z": 0}))
    tell(late, partial(sync_shell.limit_memory, 200 << 20), sync(overwrite=True))
    tell(peers, sync(until=3))
    answers = agreed([*peers, *late])
    assert (answers[2]["digest"], answers[2]["received"]) == (held, ["['a']", "['z']"])
    assert do(late, partial(sync_shell.say_whether_given, "a")) == [{"same": True}]
    # In step nothing moves, and what differs is found as ever.
    assert moved(synced([*peers, *late], sync(overwrite=True))) == [0, 0, 0]
    tell(late, put("z", value=5))
    answers = synced([*peers, *late], sync(overwrite=True))
    assert answers[0]["diverged"] == {late.ids[0]: ["['z']"]}


def test_a_holder_that_is_killed_meanwhile_is_replaced(run: Run) -> None:
    peers, late = members(run, 2), newcomer(run)
    held = synced(peers, sync(LARGE))[0]["digest"]
    strike(late, signal.SIGKILL, peers[0].pid)
    tell(peers, sync(until=late.ids[0]))
    left = [*peers[1:], *late]
    answers = agreed(left, all_live=False)
    assert (moved(answers), answers[0]["digest"]) == ([0, BIG], held)
    assert moved(synced(left, sync())) == [0, 0]


def test_parts_of_a_state_are_offered_to_nobody(run: Run) -> None:
    peers, late = members(run, 1), newcomer(run)
    synced(peers, sync(LARGE))
    tell(peers, sync(until=2))
    strike(late, signal.SIGKILL, peers[0].pid)
    told = failed(late[0].next(), "StateUnavailable", "NO_SHARED_STATE_AVAILABLE")
    assert "overwritten" in told["text"]
    assert do(late, partial(sync_shell.say_whether_all, 1)) == [{"same": False}]
    # Not by a revision either, nor in another run.
    told = failed(do(late, sync(revision=5))[0], "StateUnavailable", "NO_SHARED_STATE_AVAILABLE")
    assert "parts only" in told["text"]
    tell(late, sync_shell.rejoin)
    again = Peers(late)
    told = failed(do(again, sync(revision=5))[0], "StateUnavailable", "NO_SHARED_STATE_AVAILABLE")
    assert "parts only" in told["text"]
    # Once the program has made it anew, or loaded a checkpoint, it counts.
    assert synced(again, sync(ones(sync_faults.BIG), revision=5))[0]["revision"] == 5


def test_a_checkpoint_takes_the_place_of_parts(run: Run) -> None:
    peers, late = members(run, 1), newcomer(run)
    synced(peers, sync(LARGE))
    tell(peers, sync(until=2))
    strike(late, signal.SIGKILL, peers[0].pid)
    failed(late[0].next(), "StateUnavailable", "NO_SHARED_STATE_AVAILABLE")
    assert synced(late, sync(ones(sync_faults.BIG), revision=5))[0]["revision"] == 5


def test_an_object_is_loaded_also_if_an_earlier_sync_has_written_its_arrays(run: Run) -> None:
    peers, late = members(run, 2), newcomer(run)
    mine = {"a": keeper({"w": zeros(1000)}), "z": LARGE}
    held = synced(peers, sync(mine))[0]["digest"]
    tell(late, partial(sync_faults.sync_object_and_strike, signal.SIGINT))
    tell(peers, sync(until=3))
    interrupted(late[0].next())
    for peer in peers:
        failed(peer.next(), "PeerLost", "RANK_CONNECTION_LOST")
    answers = synced([*peers, *late], sync(overwrite=True))
    assert answers[2]["digest"] == held
    assert do(late, sync_faults.say_loads)[0]["loads"] == 1


def test_after_ctrl_c_only_what_is_missing_moves(run: Run) -> None:
    peers, late = members(run, 2), newcomer(run)
    held = synced(peers, sync(LARGE))[0]["digest"]
    strike(late, signal.SIGINT)
    tell(peers, sync(until=3))
    interrupted(late[0].next())
    for peer in peers:
        failed(peer.next(), "PeerLost", "RANK_CONNECTION_LOST")
    assert do(peers, sync_shell.say_digest) == [{"digest": held}] * 2
    answers = synced([*peers, *late], sync(overwrite=True))
    assert answers[2]["digest"] == held
    assert 0 < answers[2]["rx"] < BIG
    assert moved(synced([*peers, *late], sync())) == [0, 0, 0]


@pytest.mark.env(**FAST)
def test_founders_elect_another_state_if_the_first_ones_holder_is_killed(run: Run) -> None:
    peers = members(run, 3)
    tell(peers[:1], sync(LARGE))
    tell(peers[2:], sync(full(sync_faults.BIG, 7)))
    strike(peers[1:2], signal.SIGKILL, peers[0].pid)
    answers = agreed(peers[1:], all_live=False)
    # The second's is overwritten in part, so that of the third counts.
    assert answers[0]["size"] == 2
    assert do(peers[1:], partial(sync_shell.say_whether_all, 7)) == [{"same": True}] * 2


def test_a_failed_sync_counts_as_a_write_of_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    tensors = {"w": torch.zeros(3), "n": 1}
    for overwrote, raised in ((False, 0), (True, 1)):
        before = tensors["w"]._version
        state = State(tensors, "sync")
        with pytest.raises(KeyboardInterrupt), state.counting_writes(partial(bool, overwrote)):
            raise KeyboardInterrupt
        assert tensors["w"]._version == before + raised
