"""States and arguments that do not fit: who is told, who is put out, and that the others go on."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest
from programs import sync_faults, sync_shell
from syncs import (
    Peers,
    add,
    agreed,
    do,
    failed,
    hold,
    keeper,
    meanwhile,
    members,
    moved,
    newcomer,
    ones,
    put,
    sync,
    synced,
    tell,
    whether_equal,
    zeros,
)
from workers import Run

USUAL = {"n": 1, "w": zeros(3)}
ODD: list[tuple[Any, str]] = [
    ({"n": 1, "w": zeros(4)}, "['w']"),
    ({"n": 1, "w": zeros([3, 1])}, "['w']"),
    ({"n": 1, "w": zeros(3, "float32")}, "['w']"),
    ({"n": 1.0, "w": zeros(3)}, "['n']"),
    ({"n": 1, "v": 0, "w": zeros(3)}, "['v']"),
    ({"n": 1, "w": [zeros(3)]}, "['w']"),
]


def test_members_whose_states_differ_in_structure_all_get_the_same_error(run: Run) -> None:
    peers = members(run, 3)

    def disagree(odd_one: int, odd: Any, key: str) -> None:
        for rank, peer in enumerate(peers):
            tell([peer], sync(odd if rank == odd_one else USUAL))
        told = [failed(peer.next(), "MismatchedCall") for peer in peers]
        assert len({answer["text"] for answer in told}) == 1
        assert {answer["peer"] for answer in told} == {peers.ids[odd_one]}
        assert key in told[0]["text"] and peers.names[odd_one] in told[0]["text"]

    missing = ({"n": 1}, "['w']")
    for odd, key in (*ODD, missing):
        disagree(1, odd, key)
    assert moved(synced(peers, sync(USUAL))) == [0, 0, 0]
    for odd, key in (ODD[0], missing):
        disagree(0, odd, key)
    assert moved(synced(peers, sync(USUAL))) == [0, 0, 0]


def test_a_newcomer_whose_state_does_not_fit_is_refused_and_may_come_again(run: Run) -> None:
    peers = members(run, 2)
    synced(peers, sync(USUAL))
    late = newcomer(run)
    for odd, key in ODD:
        tell(late, sync(odd))
        told = failed(meanwhile(late[0], peers), "MismatchedCall")
        assert told["advice"] == "fix"
        assert key in told["text"] and late.names[0] in told["text"]
        tell(late, sync_shell.rejoin)
        late = Peers(late)
    tell(late, sync({"n": 5, "w": ones(3)}))
    tell(peers, sync(until=3))
    assert moved(agreed(peers + late)) == [0, 0, 25]


def sharing(form: str) -> partial[None]:
    return partial(sync_faults.sync_sharing, form)


def test_a_state_whose_entries_overlap_is_refused_on_all_members_alike(run: Run) -> None:
    peers = members(run, 3)

    def refused(rank: int | None, form: str, other: str) -> None:
        for at, peer in enumerate(peers):
            tell([peer], sharing(form if rank in (None, at) else other))
        told = [failed(peer.next(), "InvalidArgument", "INVALID_ARGUMENT") for peer in peers]
        assert len({answer["text"] for answer in told}) == 1
        assert {answer["peer"] for answer in told} == {peers.ids[rank or 0]}
        assert "['a'] and ['b'] share memory" in told[0]["text"]
        assert peers.names[rank or 0] in told[0]["text"]

    for form in ("overlapping", "reversed", "reshaped", "beside a read-only view"):
        refused(None, form, form)
    for rank in range(3):
        refused(rank, "reversed", "tied")
    for form in ("interleaved", "tied", "tied views"):
        assert moved(synced(peers, sharing(form))) == [0, 0, 0], form


def test_entries_are_one_memory_on_all_members_or_on_none(run: Run) -> None:
    peers = members(run, 3)
    for odd, usual in (("tied", "apart"), ("apart", "tied")):
        for rank, peer in enumerate(peers):
            tell([peer], sharing(odd if rank == 1 else usual))
        told = [failed(peer.next(), "MismatchedCall") for peer in peers]
        assert {answer["peer"] for answer in told} == {peers.ids[1]}
        assert "['b']" in told[0]["text"]
        assert "the same memory as ['a']" in told[0]["text"]
    assert moved(synced(peers, sharing("tied"))) == [0, 0, 0]
    tell(peers[2:], add("a"))  # both of them; the bytes come once
    answers = synced(peers, sync())
    assert moved(answers) == [0, 0, 64]
    assert answers[2]["received"] == ["['a']", "['b']"]


def test_a_newcomer_whose_entries_overlap_is_put_out_and_the_members_go_on(run: Run) -> None:
    peers = members(run, 2)
    synced(peers, sharing("tied"))
    late = newcomer(run)
    for form, kind, result in (
        ("overlapping", "InvalidArgument", "INVALID_ARGUMENT"),
        ("apart", "MismatchedCall", "INVALID_USAGE"),
    ):
        tell(late, sharing(form))
        told = failed(meanwhile(late[0], peers), kind, result)
        assert "memory" in told["text"] and late.names[0] in told["text"]
        tell(late, sync_shell.rejoin)
        late = Peers(late)
    # One that lacks a half would make it apart.
    tell(late, sync({"a": zeros(8)}))
    assert "['b']" in failed(meanwhile(late[0], peers), "MismatchedCall")["text"]
    tell(late, sync_shell.rejoin, partial(sync_faults.fill_shared, 9), sharing("tied"))
    late = Peers(late)
    tell(peers, sync(until=3))
    assert moved(agreed(peers + late)) == [0, 0, 64]


# (the run's state, a newcomer's, what the error says)
UNFIT: list[tuple[Any, Any, str]] = [
    ({"m": ones(5), "z": 1}, {"m": {}, "z": 0}, "['m']"),
    (ones(5), {}, "a dict in its place"),
    ({"opt": keeper({"w": 1}), "z": 1}, {"z": 0}, "an object with a state dict"),
    ({"m": {"x": 1}}, {"m": []}, "a list"),
]


@pytest.mark.parametrize(("state", "unfit", "why"), UNFIT, ids=[why for *_, why in UNFIT])
def test_a_newcomer_that_cannot_take_the_state_over_is_put_out_and_the_others_go_on(
    run: Run, state: Any, unfit: Any, why: str
) -> None:
    peers, late = members(run, 2), newcomer(run)
    synced(peers, sync(state))
    tell(late, hold(unfit), sync_faults.remember, sync())
    told = failed(meanwhile(late[0], peers, served=True), "MismatchedCall")
    assert why in told["text"] and told["peer"] == late.ids[0] and told["advice"] == "fix"
    assert do(late, sync_faults.say_whether_as_remembered) == [{"same": True}]
    assert synced(peers, sync())[0]["size"] == 2
    # In the same process, with one that fits.
    tell(late, sync_shell.rejoin, sync(state))
    late[0].expect("in")
    tell(peers, sync(until=3))
    agreed(peers + late)


@pytest.mark.skipif(importlib.util.find_spec("ml_dtypes") is None, reason="needs ml_dtypes")
def test_a_newcomer_that_knows_no_such_dtype_is_put_out_before_anything_is_written(
    run: Run,
) -> None:
    peers, late = members(run, 1), newcomer(run)
    synced(peers, sync({"a": ones(5), "z": ones(3, "bfloat16")}))
    tell(late, sync_shell.forget_ml_dtypes, sync({"a": zeros(5)}))
    told = failed(meanwhile(late[0], peers, served=True), "MismatchedCall")
    assert "['z']" in told["text"] and "install ml_dtypes" in told["text"]
    assert do(late, whether_equal({"a": zeros(5)})) == [{"same": True}]
    assert synced(peers, sync())[0]["size"] == 1


def test_a_peer_that_fails_to_load_a_state_counts_as_a_newcomer_in_the_next_sync(run: Run) -> None:
    peers, late = members(run, 2), newcomer(run)
    synced(peers, sync({"k": keeper({"n": 1, "m": 2}), "w": ones(9)}))
    tell(late, hold({"k": keeper({"n": 0}), "w": zeros(9)}))
    for _ in range(2):  # it lacks 'm' still, and nobody else is harmed
        tell(late, partial(sync_faults.load, broken=True))
        tell(peers, sync(until=late.ids[0]))
        told = [peer.expect("synced") for peer in peers]
        assert [answer["diverged"] for answer in told] == [{}, {}]
        assert late[0].expect("broken")["text"] == "does not load"
    tell(late, sync_faults.mend, sync())
    tell(peers, sync())
    assert agreed(peers + late)[0]["size"] == 3
    # From here on it is a member as any other.
    tell(late, put("w", 0, value=5), sync())
    tell(peers, sync())
    assert agreed(peers + late)[0]["diverged"] == {late.ids[0]: ["['w']"]}


def test_a_newcomer_without_memory_for_the_state_is_put_out_and_the_others_go_on(run: Run) -> None:
    peers, late = members(run, 2), newcomer(run)
    synced(peers, sync({"a": ones(1 << 26), "z": 1}))
    tell(late, partial(sync_shell.limit_memory, 200 << 20), sync({"z": 0}))
    told = failed(meanwhile(late[0], peers, served=True), "InternalError", "INTERNAL_ERROR")
    assert "out of memory" in told["text"]
    assert synced(peers, sync())[0]["size"] == 2


def test_the_error_of_a_refused_newcomer_says_that_it_is_the_odd_one(run: Run) -> None:
    peers = members(run, 1)
    synced(peers, sync(zeros(3)))
    late = newcomer(run)
    tell(late, sync(zeros(4)))
    assert failed(meanwhile(late[0], peers), "MismatchedCall")["peer"] == late.ids[0]


def test_the_odd_one_is_named_also_where_its_bytes_are_those_of_the_others(run: Run) -> None:
    peers = members(run, 3)
    tell(peers[:1], sync({"w": zeros([3, 1])}))
    tell(peers[1:], sync({"w": zeros(3)}))
    told = [failed(peer.next(), "MismatchedCall") for peer in peers]
    assert {answer["peer"] for answer in told} == {peers.ids[0]}


def test_a_bad_argument_is_an_error_of_this_member_alone(run: Run) -> None:
    peers = members(run, 2)
    tell(peers[1:], sync(ones(3)))
    for name, hint in (
        ("an object", "['a'][1]"),
        ("an array of objects", "['a']"),
        ("a structured array", "['a']"),
        ("a negative revision", "revision"),
        ("progress that is no function", "progress"),
        ("a negative timeout", "timeout"),
        ("a list in itself", "nested"),
    ):
        (told,) = do(peers[:1], partial(sync_faults.sync_badly, name))
        failed(told, "InvalidArgument", "INVALID_ARGUMENT")
        assert hint in told["text"]
    tell(peers[:1], sync(zeros(3)))
    assert moved(agreed(peers)) == [0, 24]
