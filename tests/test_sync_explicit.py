"""`sync_shared_state`: revisions, strategies, and entries that differ."""

from __future__ import annotations

import importlib.util
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from members import Members
from programs import sync_explicit as explicit
from syncs import (
    MIB,
    Peers,
    agreed,
    do,
    failed,
    full,
    members_1,
    moved,
    newcomer_1,
    noise,
    ones,
    synced,
    tell,
    zeros,
)
from workers import Program, Run

import pccl

push_and_sync = explicit.push_and_sync


def share(revision: int = 0, loose: list[str] | None = None, **arrays: Any) -> Program:
    return partial(explicit.share, arrays, revision, loose)


def share_and_sync(strategy: str = "ENFORCE_POPULAR", **arrays: Any) -> Program:
    """`revision` and `loose` are options, all others are arrays."""
    options = {name: arrays.pop(name) for name in ("revision", "loose") if name in arrays}
    return partial(explicit.share_and_sync, arrays, strategy, **options)


def test_explicit_a_pair_that_worked_is_not_outvoted_by_newcomers_in_its_first_sync(
    run: Run,
) -> None:
    peers = members_1(run, 2)
    tell(peers, explicit.reduce)
    late = [run.peer(partial(explicit.serve, 5)) for _ in range(3)]
    tell(peers, partial(explicit.grow, 5))
    for worker in late:
        worker.expect("in")
    tell(late, share_and_sync(w=zeros(100)))
    tell(peers, share_and_sync(w=ones(100)))
    assert moved(agreed([*peers, *late])) == [0, 0, 800, 800, 800]


def test_explicit_members_in_lockstep_move_nothing_and_a_newcomer_receives(run: Run) -> None:
    peers = members_1(run, 2)
    for peer, name in zip(peers, peers.ids, strict=True):
        tell([peer], share(w=noise(int(name[:6], 16), 3_000_000), step=zeros(1, "int64")))
    answers = synced(peers, explicit.sync)
    assert moved(answers) == [0, 3_000_000]
    for revision in range(1, 4):
        answers = synced(peers, partial(explicit.add, "step", 1), push_and_sync)
        assert moved(answers) == [0, 0]
        assert answers[0]["revision"] == revision
    late = newcomer_1(run, peers)
    tell(late, share_and_sync(w=noise(9, 3_000_000), step=zeros(1, "int64")))
    tell(peers, push_and_sync)
    everybody = peers + late
    answers = agreed(everybody)
    assert moved(answers) == [0, 0, 3_000_008]
    assert [answer["revision"] for answer in answers] == [4, 4, 4]  # written to the newcomer's
    assert moved(synced(everybody, push_and_sync)) == [0, 0, 0]


def test_explicit_a_member_that_lags_is_dragged_along(run: Run) -> None:
    peers = members_1(run, 3)
    synced(peers, share_and_sync(w=zeros(100)))
    # Two forget to count, and would be the majority.
    tell(peers[1:], partial(explicit.add, "w", 1), explicit.sync)
    tell(peers[:1], partial(explicit.add, "w", 2), push_and_sync)
    answers = agreed(peers)
    assert moved(answers) == [0, 800, 800]
    assert [answer["revision"] for answer in answers] == [1, 1, 1]
    assert do(peers, partial(explicit.say_whether_all, "w", 2)) == [{"same": True}] * 3
    # Behind in its number alone: nothing moves.
    tell(peers[2:], explicit.sync)
    tell(peers[:2], push_and_sync)
    answers = agreed(peers)
    assert moved(answers) == [0, 0, 0]
    assert [answer["revision"] for answer in answers] == [2, 2, 2]


def test_explicit_a_run_resumes_at_a_checkpoints_revision(run: Run) -> None:
    peers = members_1(run, 2)
    tell(peers[:1], share_and_sync(w=zeros(100)))
    tell(peers[1:], share_and_sync(w=ones(100), revision=41))
    answers = agreed(peers)
    assert moved(answers) == [800, 0]
    assert answers[0]["revision"] == 41
    assert synced(peers, push_and_sync)[0]["revision"] == 42
    # Ahead of the run: refused as a candidate, welcome as a receiver.
    late = newcomer_1(run, peers)
    tell(late, share_and_sync(w=ones(100), revision=44))
    tell(peers, push_and_sync)
    failed(late[0].next(), "RevisionMismatch")
    answers = agreed(peers)
    assert (answers[0]["revision"], answers[0]["size"]) == (43, 2)
    tell(late, partial(explicit.join, 1))
    tell(peers, partial(explicit.grow, 3))
    late = Peers(late)
    tell(late, share_and_sync("RECEIVE_ONLY", w=zeros(100), revision=99))
    tell(peers, partial(push_and_sync, "SEND_ONLY"))
    answers = agreed(peers + late)
    assert moved(answers) == [0, 0, 800]
    assert answers[2]["revision"] == 44


def test_explicit_senders_and_receivers_pair(run: Run) -> None:
    peers = members_1(run, 3)
    synced(peers, share_and_sync(w=zeros(1000)))
    # The receivers are the majority, stand longer, and claim a higher revision. They offer nothing.
    tell(peers[:2], share_and_sync("RECEIVE_ONLY", w=ones(1000), revision=7))
    tell(peers[2:], share(w=full(1000, 2, "float64"), revision=1))
    tell(peers[2:], partial(explicit.set_writeable, "w", False))
    tell(peers[2:], partial(explicit.sync, "SEND_ONLY"))
    answers = agreed(peers)
    assert moved(answers) == [8000, 8000, 0]
    assert answers[0]["revision"] == 1


def test_explicit_strategies_that_do_not_mix_are_refused_and_may_join_again(run: Run) -> None:
    peers = members_1(run, 3)
    synced(peers, share_and_sync(w=zeros(1000)))
    tell(peers[:2], push_and_sync)
    tell(peers[2:], partial(push_and_sync, "SEND_ONLY"))
    told = failed(peers[2].next(), "Evicted")
    assert told["advice"] == "rejoin" and "ENFORCE_POPULAR" in told["text"]
    answers = agreed(peers[:2])
    assert (answers[0]["size"], moved(answers)) == (2, [0, 0])
    # A new connect on the same communicator.
    tell(peers[2:], partial(explicit.join, 1))
    tell(peers[:2], partial(explicit.grow, 3))
    peers[2].expect("in")
    tell(peers[2:], share_and_sync(w=ones(1000)))
    tell(peers[:2], push_and_sync)
    assert moved(agreed(peers)) == [0, 0, 8000]


def test_explicit_a_sender_that_loses_the_election_is_evicted(run: Run) -> None:
    peers = members_1(run, 3)
    synced(peers, share_and_sync(w=zeros(1000)))
    tell(peers[:1], partial(explicit.put, "w", 0, 1))
    tell(peers, partial(push_and_sync, "SEND_ONLY"))
    assert "another one was elected" in failed(peers[0].next(), "Evicted")["text"]
    answers = agreed(peers[1:])
    assert (answers[0]["size"], moved(answers)) == (2, [0, 0])


def test_explicit_receivers_without_a_sender_all_get_the_same_error(run: Run) -> None:
    peers = members_1(run, 2)
    told = do(peers, share_and_sync("RECEIVE_ONLY", w=zeros(1000)))
    for answer in told:
        failed(answer, "StateUnavailable")
    assert told[0]["text"] == told[1]["text"]
    assert moved(synced(peers, explicit.sync)) == [0, 0]


def test_explicit_entries_that_may_differ_are_only_for_newcomers(run: Run) -> None:
    peers = members_1(run, 2)
    for seed, peer in enumerate(peers):
        tell([peer], share_and_sync(w=noise(1, 1000), rng=noise(seed, 3000), loose=["rng"]))
    told = [peer.expect("synced") for peer in peers]
    assert moved(told) == [0, 0]
    assert told[0]["digest"] != told[1]["digest"]
    late = newcomer_1(run, peers)
    tell(late, share_and_sync(w=noise(9, 1000), rng=noise(9, 3000), loose=["rng"]))
    tell(peers, push_and_sync)
    told = [peer.expect("synced") for peer in peers + late]
    assert moved(told) == [0, 0, 4000]
    assert told[2]["digest"] == told[0]["digest"] != told[1]["digest"]
    # From then on it is its own.
    tell(late, partial(explicit.add, "rng", 1))
    told = do(peers + late, push_and_sync)
    assert moved(told) == [0, 0, 0]


def test_explicit_takes_every_data_type_any_size_and_any_alignment(run: Run) -> None:
    peers = members_1(run, 2)
    answers = synced(peers, explicit.share_every_data_type)
    sizes = [dtype.size for dtype in pccl.DataType]
    assert moved(answers) == [0, 3 * sum(9 * size + MIB for size in sizes)]


def test_explicit_a_pending_operation_and_a_read_only_array_are_errors_of_this_member_alone(
    run: Run,
) -> None:
    peers = members_1(run, 2)
    for rank, peer in enumerate(peers):
        tell([peer], share(w=full(1000, rank)))
    tell(peers[:1], explicit.begin_reduction)
    failed(do(peers[:1], explicit.sync)[0], "PendingOperations", "PENDING_ASYNC_OPS")
    tell(peers[1:], explicit.begin_reduction)
    tell(peers, explicit.end_reduction)
    tell(peers[:1], partial(explicit.set_writeable, "w", False))
    told = failed(do(peers[:1], explicit.sync)[0], "InvalidArgument", "INVALID_ARGUMENT")
    assert "w is read-only" in told["text"]
    tell(peers[:1], partial(explicit.set_writeable, "w", True))
    assert moved(synced(peers, explicit.sync)) == [0, 8000]


def test_explicit_entries_that_differ_are_named(run: Run) -> None:
    usual = share_and_sync(v=zeros(3), w=zeros(1000))
    peers = members_1(run, 3)

    def disagree(odd: Program, name: str) -> None:
        tell(peers[:1], odd)
        told = [
            failed(answer, "MismatchedCall") for answer in [*do(peers[1:], usual), peers[0].next()]
        ]
        assert len({answer["text"] for answer in told}) == 1
        assert {answer["peer"] for answer in told} == {peers.ids[0]}
        assert f" {name}:" in told[0]["text"]

    for odd, name in (
        (share_and_sync(v=zeros(3), w=zeros(1001)), "w"),
        (share_and_sync(v=zeros(3), w=ones(1000, "int64")), "w"),
        (share_and_sync(w=zeros(1000)), "v"),
        (share_and_sync(u=zeros(3), v=zeros(3), w=zeros(1000)), "u"),
        (share_and_sync(v=ones(3), w=zeros(1000), loose=["v"]), "v"),
    ):
        disagree(odd, name)
    assert moved(synced(peers, usual)) == [0, 0, 0]
    # A newcomer that lacks an entry is refused here: nobody could write it for it.
    late = newcomer_1(run, peers)
    tell(late, share_and_sync(w=zeros(1000)))
    tell(peers, push_and_sync)
    told = failed(late[0].next(), "MismatchedCall")
    assert late.names[0] in told["text"] and " v:" in told["text"]
    assert agreed(peers)[0]["size"] == 3


def test_explicit_entries_overlap_on_no_member_and_are_one_memory_on_all_or_none(run: Run) -> None:
    peers = members_1(run, 3)
    for odd, usual, kind, result in (
        ("overlapping", "side by side", "InvalidArgument", "INVALID_ARGUMENT"),
        ("tied", "apart", "MismatchedCall", "INVALID_USAGE"),
        ("apart", "tied", "MismatchedCall", "INVALID_USAGE"),
    ):
        tell(peers[:1], partial(explicit.share_memory, odd), explicit.sync)
        tell(peers[1:], partial(explicit.share_memory, usual), explicit.sync)
        told = [failed(peer.next(), kind, result) for peer in peers]
        assert len({answer["text"] for answer in told}) == 1
        assert {answer["peer"] for answer in told} == {peers.ids[0]}
        assert " w" in told[0]["text"] and "memory" in told[0]["text"]
    tied = partial(explicit.share_memory, "tied")
    assert moved(synced(peers, tied, explicit.sync)) == [0, 0, 0]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_explicit_a_tensor_may_get_other_memory_between_two_syncs(run: Run) -> None:
    peers = members_1(run, 2)
    answers = synced(peers, explicit.share_a_parameter_with_new_memory)
    assert moved(answers) == [0, 16 * MIB]
    assert do(peers, explicit.say_parameter) == [{"p": [5.0, 5.0]}] * 2
    tell(peers, explicit.resize_parameter)
    for answer in do(peers, explicit.sync):
        assert "was resized" in failed(answer, "InvalidUsage")["text"]


def test_explicit_order_of_entries_and_memory_of_tensors_do_not_matter(run: Run) -> None:
    peers = members_1(run, 2)
    tell(peers[:1], share_and_sync(a=zeros(10), b=ones(10)))
    tell(peers[1:], share_and_sync(b=zeros(10), a=zeros(10)))
    assert moved(agreed(peers)) == [0, 80]
    # Held by reference: nobody else has these arrays any more.
    tell(peers, explicit.share_what_nobody_else_holds)
    assert moved(synced(peers, explicit.sync)) == [0, MIB]
    failed(
        do(peers[:1], explicit.share_an_array_twice)[0],
        "InvalidArgument",
        "INVALID_ARGUMENT",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"revision": -1}, r"revision must be an integer in 0\.\."),
        ({"revision": 1.5}, r"revision must be an integer in 0\.\."),
        ({"revision": 2**64}, r"revision must be an integer in 0\.\."),
        ({"name": 5}, "an entry's name is text, not 5"),
    ],
)
def test_what_is_no_state_is_refused(members: Members, change: dict[str, Any], words: str) -> None:
    (alone,) = members(1)
    state = pccl.SharedState([pccl.TensorInfo.from_numpy(np.ones(1), change.get("name", "w"))])
    state.revision = change.get("revision", 0)
    with pytest.raises(pccl.InvalidArgument, match=words):
        alone.sync_shared_state(state)
    with pytest.raises(pccl.InvalidArgument, match="must be a SharedState, not a dict"):
        alone.sync_shared_state({"w": np.ones(1)})  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [3, (1,), (0, 1, 2), "01", (1, 1), (0, 17)])
def test_a_masters_place_is_a_pair(place: Any) -> None:
    with pytest.raises(pccl.InvalidArgument, match="place"):
        pccl.MasterNode("127.0.0.1:0", place=place)


def test_a_wait_for_a_master_has_a_time() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        for seconds in (math.nan, -1, "x"):
            with pytest.raises(pccl.InvalidArgument, match="a timeout is seconds"):
                master.wait(seconds)  # type: ignore[arg-type]
        assert not master.wait(0)
        master.interrupt()
        assert master.wait(math.inf)
