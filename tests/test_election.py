"""The choice of the state that counts: standing members, then revision, majority, seniority."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from pccl import _testing

POPULAR, RECEIVE_ONLY, SEND_ONLY = range(3)
DETAIL, TRANSFER, AGAIN, DONE = 1, 2, 3, 4
OK, INVALID, MISMATCHED, EVICTED, AHEAD, UNAVAILABLE = 0, 1, 6, 15, 16, 17
CHUNK = 1 << 20

ONE = [("w", "float32")]


def judge(votes, revision=None, holders=(), *, owned=True, details=True, flaws=()):
    return _testing.judge_state(
        votes, revision, list(holders), owned=owned, details=details, flaws=dict(flaws)
    )


def vote(
    peer,
    content,
    revision=None,
    strategy=POPULAR,
    entries=ONE,
    since=1,
    worked=0,
    whole=True,
    mixed=False,
):
    named = [(*entry, "")[:3] for entry in entries]  # (name, kind, tie)
    return (peer, revision, strategy, content, named, since, worked, whole, mixed)


contents = st.lists(st.integers(1, 3), min_size=1, max_size=8)


@given(contents, st.sets(st.integers(0, 7)), st.integers(0, 100))
def test_a_newcomers_state_never_wins(
    contents: list[int], holders: set[int], revision: int
) -> None:
    present = [peer for peer in range(len(contents)) if peer in holders]
    found = judge([vote(p, c) for p, c in enumerate(contents)], revision, holders)
    if not present:
        assert found["code"] == UNAVAILABLE
        assert "revision" in found["reason"]
        return
    assert found["code"] == OK
    standing = Counter(contents[peer] for peer in present)
    assert standing[found["content"]] == max(standing.values())
    first = next(c for c in (contents[p] for p in present) if standing[c] == max(standing.values()))
    assert found["content"] == first  # ties: the longest-standing member's
    assert found["revision"] == revision + 1
    assert found["holders"] == [p for p in present if contents[p] == found["content"]]
    receivers = [p for p, c in enumerate(contents) if c != found["content"]]
    assert found["receivers"] == receivers
    assert found["diverged"] == [p for p in receivers if p in holders]
    assert set(found["newcomers"]) == set(receivers) - holders


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=8))
def test_of_founders_the_highest_revision_counts(votes: list[tuple[int, int]]) -> None:
    found = judge([vote(peer, c, revision=r) for peer, (c, r) in enumerate(votes)])
    highest = max(r for _, r in votes)
    assert found["revision"] == highest
    assert found["content"] in {c for c, r in votes if r == highest}
    for peer in found["holders"]:
        assert votes[peer] == (found["content"], highest)


def test_in_a_first_sync_those_that_worked_first_are_standing() -> None:
    # One has trained alone; two with equal fresh weights come in through this sync.
    votes = [vote(0, 1, worked=1), vote(1, 2, since=3), vote(2, 2, since=3)]
    found = judge(votes)
    assert (found["content"], found["holders"], found["receivers"]) == (1, [0], [1, 2])
    assert (found["newcomers"], found["diverged"]) == ([1, 2], [])
    # Also if they came in before, and all have worked together since.
    votes = [vote(0, 1, worked=1), *(vote(p, 2, since=3, worked=3) for p in (1, 2, 3))]
    assert judge(votes)["content"] == 1
    # Those that worked first together are equal, whoever let in whom.
    votes = [vote(0, 1, worked=4), vote(1, 2, since=2, worked=4), vote(2, 2, since=4, worked=4)]
    assert judge(votes)["content"] == 2
    # A newcomer's checkpoint does not replace what was trained, and the newcomer may lack entries.
    votes = [vote(0, 1, revision=0, worked=1), vote(1, 2, revision=9, since=3)]
    assert judge(votes)["removals"] == [(1, AHEAD)]
    both = [("m", "float32"), ("w", "float32")]
    assert judge([vote(0, 1, worked=1, entries=both), vote(1, 2, since=2)])["step"] == TRANSFER
    # A member that only receives has nothing to lose.
    votes = [vote(0, 1, 0, RECEIVE_ONLY, worked=1), vote(1, 2, 0, SEND_ONLY, since=3)]
    assert judge(votes, owned=False)["content"] == 2


def test_in_a_first_sync_before_any_work_those_let_in_first_count_unless_a_revision_says_more() -> (
    None
):
    assert judge([vote(0, 1), vote(1, 2, since=3), vote(2, 2, since=3)])["content"] == 1
    assert judge([vote(0, 1), vote(1, 2), vote(2, 2)])["content"] == 2
    # A checkpoint, whoever brings it; and the explicit API's founders, who let each other in.
    assert judge([vote(0, 1), vote(1, 2, 40, since=3)])["content"] == 2
    explicit = [vote(0, 1, 0, since=1), vote(1, 2, 0, since=2), vote(2, 2, 0, since=3)]
    found = judge(explicit, owned=False)
    assert (found["content"], found["newcomers"]) == (2, [])
    odd = [vote(0, 1, 0, since=1, entries=[("w", "float64")]), *explicit[1:]]
    found = judge(odd, owned=False)
    assert (found["code"], found["culprit"], found["removals"]) == (MISMATCHED, 0, [])


def voted(index: int, what: tuple[int, int, int]) -> tuple:
    content, since, worked = what
    return vote(index, content, since=since, worked=worked and max(worked, since))


founders = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3))


@given(st.lists(founders, min_size=1, max_size=8))
def test_a_first_sync_never_overwrites_an_older_member_by_a_newer_one(
    members: list[tuple[int, int, int]],
) -> None:
    votes = [voted(index, what) for index, what in enumerate(members)]
    found = judge(votes)
    working = [v for v in votes if v[6]]
    age = {v[0]: (v[6] or 99, 0 if working else v[5]) for v in votes}
    for receiver in found["receivers"]:
        assert any(age[holder] <= age[receiver] for holder in found["holders"])
    assert min(age[holder] for holder in found["holders"]) == min(age.values())


def test_a_member_that_did_not_take_the_state_over_counts_as_a_newcomer() -> None:
    torn = [vote(0, 1, whole=False), vote(1, 2), vote(2, 1, whole=False)]
    found = judge(torn, 3, [0, 1, 2])
    assert (found["content"], found["newcomers"], found["diverged"]) == (2, [0, 2], [])
    # It may still lack what it did not get, and a structure of its own concerns only itself.
    both = [("m", "float32"), ("w", "float32")]
    votes = [vote(0, 1, entries=both), vote(1, 2, whole=False)]
    assert judge(votes, 3, [0, 1])["step"] == TRANSFER
    votes = [vote(0, 1), vote(1, 2, whole=False, entries=both)]
    assert judge(votes, 3, [0, 1])["removals"] == [(1, MISMATCHED)]
    # With the last one that has the state it is lost.
    assert judge([vote(1, 2, whole=False)], 3, [0, 1])["code"] == UNAVAILABLE


def test_parts_of_a_state_are_never_elected() -> None:
    # In a run's first sync, whose first try has overwritten a part of one founder's state.
    found = judge([vote(0, 1, mixed=True), vote(1, 2)])
    assert (found["content"], found["holders"], found["receivers"]) == (2, [1], [0])
    assert found["newcomers"] == [0]  # its loose entries are mixed, too
    # Nor by the revision that they had, or instead of a state that is lost.
    found = judge([vote(0, 1, 9, mixed=True), vote(1, 2, 4)])
    assert (found["content"], found["revision"], found["removals"]) == (2, 4, [])
    votes = [vote(0, 1, 0, RECEIVE_ONLY), vote(1, 2, 9, RECEIVE_ONLY, mixed=True)]
    for found in (judge(votes), judge([vote(1, 2, 9, mixed=True)], 3, [0, 1])):
        assert found["code"] == UNAVAILABLE
        assert "parts only" in found["reason"]
    # A member that did not load the last state may bring a checkpoint if the state is lost.
    assert judge([vote(1, 2, 9, whole=False)], 3, [0, 1])["content"] == 2
    # Fresh weights do not take the place of trained ones, which are lost with those that had them.
    found = judge([vote(0, 1, worked=1, mixed=True), vote(1, 2, since=3)])
    assert found["code"] == UNAVAILABLE
    # Nor does the revision of such a member make founders of those that came later.
    found = judge([vote(0, 1), vote(1, 2, 9, since=3, mixed=True), vote(2, 3, since=3)])
    assert (found["content"], found["holders"]) == (1, [0])


def test_a_member_is_in_one_sync_at_a_time_and_lists_of_entries_have_a_limit() -> None:
    vote_, detail, end = 4, 5, 6
    gib = 1 << 30
    usual = [(vote_, 0, 0), (detail, 0, 1000), (detail, 0, 1000), (end, 0, 0)]
    assert _testing.enter_rounds(usual, gib) == [True] * 4
    for kind in (vote_, detail, end):
        assert _testing.enter_rounds([(kind, 0, 9), (kind, 1, 9)], gib) == [True, False]
    assert _testing.enter_rounds([(detail, 0, 10_000)], 5000) == [False]
    assert _testing.enter_rounds([(0, 0, 0), (2, 0, 0), (2, 1, 0)], gib) == [True] * 3


LOST, UNREACHABLE, BROKEN, TIMEOUT = 9, 10, 18, 11


def ends(*given):
    return _testing.judge_ends([(p, code, 7, 1, list(lost)) for p, code, *lost in given])


def test_a_receivers_own_failure_puts_only_that_receiver_out() -> None:
    found = ends((0, OK), (1, BROKEN), (2, OK))
    assert (found["code"], found["removals"]) == (OK, [(1, BROKEN)])
    found = ends((0, OK), (2, OK))
    assert (found["step"], found["revision"], found["content"]) == (DONE, 7, 1)
    # Where nobody else came through there is nobody to go on.
    found = ends((1, BROKEN), (2, BROKEN))
    assert (found["code"], found["removals"]) == (BROKEN, [])


def test_a_receiver_that_none_of_its_live_sources_can_serve_is_put_out() -> None:
    assert ends((0, OK), (1, OK), (2, LOST, 0, 1))["removals"] == [(2, UNREACHABLE)]
    # One of them is gone: once more, without it.
    found = ends((0, OK), (2, LOST, 0, 1))
    assert (found["step"], found["removals"]) == (AGAIN, [])
    found = ends((2, LOST, 0), (3, LOST, 0))
    assert (found["step"], found["removals"], found["code"]) == (AGAIN, [], OK)
    # The failure of another is its own.
    found = ends((2, LOST, 0), (3, BROKEN))
    assert (found["step"], found["removals"]) == (AGAIN, [(3, BROKEN)])
    assert ends((0, OK), (1, UNAVAILABLE))["code"] == UNAVAILABLE  # too many tries


def test_members_that_end_with_different_states_are_never_told_that_they_agree() -> None:
    found = _testing.judge_ends([(0, OK, 7, 1, []), (1, OK, 7, 2, [])])
    assert (found["code"], found["culprit"]) == (BROKEN, 1)
    found = _testing.judge_ends([(0, OK, 7, 1, []), (1, OK, 8, 1, [])])
    assert found["code"] == BROKEN
    # A member that failed has no say in it.
    found = _testing.judge_ends([(0, BROKEN, 9, 9, []), (1, OK, 7, 1, [])])
    assert (found["removals"], found["revision"]) == ([(0, BROKEN)], 7)


def test_members_in_step_are_done_at_once() -> None:
    found = judge([vote(0, 1), vote(1, 1)], 4, [0, 1], details=False)
    assert found["step"] == DONE
    assert judge([vote(0, 1), vote(1, 2)], 4, [0, 1], details=False)["step"] == DETAIL


def test_a_newcomer_ahead_of_the_run_is_put_out_unless_it_only_receives() -> None:
    found = judge([vote(0, 1, 5, SEND_ONLY), vote(1, 2, 9, SEND_ONLY)], 4, [0], owned=False)
    assert found["removals"] == [(1, AHEAD)]
    found = judge([vote(0, 1, 5, SEND_ONLY), vote(1, 2, 9, RECEIVE_ONLY)], 4, [0], owned=False)
    assert found["removals"] == []
    assert found["receivers"] == [1]


def test_strategies_that_do_not_mix_put_out_those_that_do_not_enforce() -> None:
    found = judge(
        [vote(0, 1, 1), vote(1, 1, 1, SEND_ONLY), vote(2, 1, 1, RECEIVE_ONLY)], owned=False
    )
    assert found["removals"] == [(1, EVICTED), (2, EVICTED)]


def test_one_that_only_sends_and_is_outvoted_is_put_out() -> None:
    votes = [vote(0, 1, 1, SEND_ONLY), vote(1, 2, 1, SEND_ONLY), vote(2, 2, 1, SEND_ONLY)]
    assert judge(votes, owned=False)["removals"] == [(0, EVICTED)]


def test_a_state_that_nobody_offers_is_unavailable() -> None:
    found = judge([vote(0, 1, 1, RECEIVE_ONLY), vote(1, 1, 1, RECEIVE_ONLY)], owned=False)
    assert found["code"] == UNAVAILABLE


def test_a_checkpoint_takes_the_place_of_a_lost_state() -> None:
    found = judge([vote(3, 1), vote(4, 2, revision=40)], 50, [0, 1, 2])
    assert (found["code"], found["content"], found["revision"]) == (OK, 2, 40)


def test_standing_members_that_disagree_on_structure_end_the_sync_for_all() -> None:
    votes = [vote(0, 1), vote(1, 2, entries=[("w", "float64")])]
    found = judge(votes, 3, [0, 1])
    assert found["code"] == MISMATCHED
    assert found["culprit"] == 1
    assert "w" in found["reason"]
    assert "float64" in found["reason"]


def test_only_a_newcomer_may_lack_entries_and_only_where_the_library_counts() -> None:
    both = [("m", "float32"), ("w", "float32")]
    assert judge([vote(0, 1, entries=both), vote(1, 2)], 3, [0])["step"] == TRANSFER
    assert judge([vote(0, 1, entries=both), vote(1, 2)], 3, [0, 1])["code"] == MISMATCHED
    explicit = judge([vote(0, 1, 4, entries=both), vote(1, 2, 0)], 3, [0], owned=False)
    assert explicit["removals"] == [(1, MISMATCHED)]
    # An entry that the group does not have cannot be made equal.
    assert judge([vote(0, 1), vote(1, 2, entries=both)], 3, [0])["removals"] == [(1, MISMATCHED)]


def test_entries_that_are_one_memory_are_so_on_all_members() -> None:
    apart = [("a", "float32"), ("b", "float32")]
    tied = [("a", "float32"), ("b", "float32", "a")]
    for states in ((tied, apart), (apart, tied)):
        votes = [vote(peer, 1, entries=entries) for peer, entries in enumerate(states)]
        assert judge(votes, 3, [0, 1], details=False)["step"] == DETAIL  # though bytes are equal
        found = judge(votes, 3, [0, 1])
        assert found["code"] == MISMATCHED and found["culprit"] == 1
        assert " b: peer " in found["reason"] and "float32, the same memory as a" in found["reason"]
        assert judge(votes, 3, [0])["removals"] == [(1, MISMATCHED)]
    both = [vote(0, 1, entries=tied), vote(1, 1, entries=tied)]
    assert judge(both, 3, [0], details=False)["step"] == DONE
    # A newcomer that lacks one of them would make it apart.
    half = [vote(0, 1, entries=tied), vote(1, 2, entries=apart[:1])]
    assert judge(half, 3, [0])["removals"] == [(1, MISMATCHED)]


def test_a_state_that_cannot_be_shared_ends_the_sync_for_all_or_puts_a_newcomer_out() -> None:
    votes = [vote(0, 1), vote(1, 2), vote(2, 1)]
    found = judge(votes, 3, [0, 1], details=False, flaws={1: "a and b share memory"})
    assert (found["code"], found["culprit"], found["removals"]) == (INVALID, 1, [])
    assert found["reason"].endswith("cannot be shared: a and b share memory")
    found = judge(votes, 3, [0, 1], details=False, flaws={2: "a and b share memory"})
    assert (found["code"], found["removals"]) == (OK, [(2, INVALID)])
    both = judge(votes, 3, [0, 1], details=False, flaws={0: "one", 2: "two"})
    assert (both["code"], both["culprit"], both["removals"]) == (INVALID, 0, [])


def test_a_holders_list_must_fit_to_what_this_member_has() -> None:
    mine = ("b", "float32", [3], 12, True)
    assert _testing.manifest_fits([mine], [mine])
    assert _testing.manifest_fits([("a", "int8", [5], 5, True), mine], [mine])
    for other in (
        ("b", "float64", [3], 12, True),
        ("b", "float32", [1, 3], 12, True),
        ("b", "float32", [3], 11, True),  # would be written in place
        ("a", "int8", [5], 2**64 - 1, True),  # wraps around to no chunk at all
        ("a", "int8", [5], 2**63, True),
    ):
        assert not _testing.manifest_fits([other], [mine]), other
    nine, two = ([("v", "Python int", [], size, False)] for size in (9, 2))
    assert _testing.manifest_fits(nine, two)


def test_a_holders_list_has_one_content_for_entries_that_are_one_memory() -> None:
    a, b, c = (
        ("a", "uint8", [12], 12, True),
        ("b", "uint8", [12], 12, True),
        ("c", "uint8", [13], 13, True),
    )
    assert _testing.manifest_fits([a, b, c], [a, b, c], "b", "a")
    assert not _testing.manifest_fits([a, b, c], [a, b, c], "c", "a")
    assert not _testing.manifest_fits([b, c], [b, c], "b", "a")


@given(st.lists(st.integers(0, 3 * CHUNK), max_size=8))
def test_chunks_tile_every_entry(sizes: list[int]) -> None:
    covered = [0] * len(sizes)
    for entry, offset, count in _testing.chunk_places(sizes):
        assert offset == covered[entry]
        assert 0 < count <= CHUNK
        covered[entry] += count
    assert covered == sizes


@st.composite
def views(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """A view of some of 200 bytes at a fixed place: any strides, and elements apart or not."""
    item = draw(st.sampled_from([1, 2, 4, 8]))
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    steps = [draw(st.integers(-24, 24)) for _ in shape]
    low = sum(min(0, (n - 1) * step) for n, step in zip(shape, steps, strict=True))
    high = sum(max(0, (n - 1) * step) for n, step in zip(shape, steps, strict=True)) + item
    assume(high - low <= 200)
    start = draw(st.integers(-low, 200 - high))
    return np.ndarray(shape, f"V{item}", MEMORY, start, steps)


MEMORY = np.zeros(200, np.uint8)


@given(views(), views())
def test_arrays_overlap_exactly_when_they_share_a_byte(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]
) -> None:
    def place(array: np.ndarray[Any, Any]) -> tuple[int, int, list[tuple[int, int]]]:
        axes = list(zip(array.shape, array.strides, strict=True))
        return array.__array_interface__["data"][0], array.itemsize, axes

    assert _testing.overlap(place(a), place(b)) == np.shares_memory(a, b)


def test_a_comparison_of_huge_arrays_ends_soon() -> None:
    columns = [(0x1000 + 8 * at, 8, [(1 << 30, 4096), (10, 16)]) for at in (0, 1)]
    assert not _testing.overlap(*columns)
    assert _testing.overlap(columns[0], (0x1000 + 4096 * 1000, 4, [(1 << 20, 12)]))
    # They are apart, but that takes too long to find out.
    pairs = (0x1000 + 500, 1, [(1 << 24, 1000), (2, 3)])
    assert _testing.overlap((0x1000, 1, [(1 << 24, 1000)]), pairs)
    assert not _testing.overlap((0x1000, 1, [(1 << 10, 1000)]), pairs)
