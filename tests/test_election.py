"""Whose state counts, as a pure function: standing members over newcomers, revision, majority, seniority."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pccl import _testing

POPULAR, RECEIVE_ONLY, SEND_ONLY = range(3)
DETAIL, TRANSFER, AGAIN, DONE = 1, 2, 3, 4
OK, MISMATCHED, EVICTED, AHEAD, UNAVAILABLE = 0, 6, 15, 16, 17
CHUNK = 1 << 20

ONE = [("w", "float32")]


def judge(votes, revision=None, holders=(), *, owned=True, details=True):
    return _testing.judge_state(votes, revision, list(holders), owned=owned, details=details)


def vote(peer, content, revision=None, strategy=POPULAR, entries=ONE):
    return (peer, revision, strategy, content, list(entries))


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
    level1 = judge([vote(0, 1, 4, entries=both), vote(1, 2, 0)], 3, [0], owned=False)
    assert level1["removals"] == [(1, MISMATCHED)]
    # What the group does not have cannot be made equal.
    assert judge([vote(0, 1), vote(1, 2, entries=both)], 3, [0])["removals"] == [(1, MISMATCHED)]


@given(st.lists(st.integers(0, 3 * CHUNK), max_size=8))
def test_chunks_tile_every_entry(sizes: list[int]) -> None:
    covered = [0] * len(sizes)
    for entry, offset, count in _testing.chunk_places(sizes):
        assert offset == covered[entry]
        assert 0 < count <= CHUNK
        covered[entry] += count
    assert covered == sizes
