"""Relays that make no sense, and frames that have no place in an operation."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports import (
    LEAVE,
    LINK_REPORT,
    MENDED,
    RELAYED,
    UNREACHABLE,
    WANT_RELAY,
    gone,
    link_report,
    peer,
    text,
    u32,
)

from pccl import _testing

# Links that the master relays.


def nobody_connects(members: int, limits: dict[str, int] | None = None) -> _testing.MasterPlay:
    play = _testing.MasterPlay(members, {"relays": 1} | (limits or {}))
    for one, other in itertools.combinations(range(1, members + 1), 2):
        play.says(other, LINK_REPORT, link_report(one, play.epoch(), UNREACHABLE))
    play.passes(2)
    assert play.relayed() == list(itertools.combinations(range(members), 2))
    play.told()
    return play


@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("state", [MENDED, RELAYED], ids=["mended", "relayed"])
def test_only_a_link_that_came_about_by_itself_counts_as_one(state: int, restarted: bool) -> None:
    play = nobody_connects(3)
    if restarted:
        play.restart()  # nobody has asked this master for a relay
    for reporter, about in ((1, 2), (2, 1)):
        play.says(reporter, LINK_REPORT, link_report(about, play.epoch(), state))
    play.says(3, LEAVE, text(""))
    assert play.members() == [1, 2]
    assert play.relayed() == ([] if state == MENDED else [(0, 1)])


def test_questions_for_relays_beyond_a_rate_get_no_answer_and_cost_nothing_else() -> None:
    play = nobody_connects(2, {"wants": 20})
    for asked, answered in ((60, 20), (60, 0)):
        for _ in range(asked):
            play.says(2, WANT_RELAY, peer(1) + u32(1))
        told = [(to, about) for to, what, about, _ in play.told() if what == "relay"]
        assert sorted(told) == [(1, 2)] * answered + [(2, 1)] * answered
    play.passes(30)
    play.told()
    play.says(2, WANT_RELAY, peer(1) + u32(1))
    assert [what for _, what, _, _ in play.told()] == ["relay", "relay"]
    assert play.members() == [1, 2]


def test_a_question_for_a_relay_that_crossed_an_epoch_costs_nothing() -> None:
    play = nobody_connects(3)
    play.says(1, LEAVE, text(""))
    for gone_or_not in (1, 2):
        play.says(3, WANT_RELAY, peer(gone_or_not) + u32(1))
    play.disconnect(2)
    play.says(3, WANT_RELAY, peer(2) + u32(1))  # it may be back in a moment
    assert play.members() == [2, 3]


PAIRS = list(itertools.combinations(range(16), 2))


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        pytest.param(PAIRS[:64], "", id="as many as there may be"),
        pytest.param(PAIRS[:65], "65 relayed pairs are over the limit of 64", id="too many"),
        pytest.param(PAIRS[:2] + PAIRS[1:3], "listed twice", id="repeated"),
        pytest.param(PAIRS[:3][::-1], "out of order", id="out of order"),
        pytest.param([(1, 0)], "not a pair of its members", id="turned round"),
        pytest.param([(1, 1)], "not a pair of its members", id="with itself"),
        pytest.param([(1, 16)], "not a pair of its members", id="a stranger"),
        pytest.param([(0, 1)] * 100_000, "100000 relayed pairs", id="one without end"),
    ],
)
def test_relays_that_make_no_sense_are_refused_by_master_and_member(
    pairs: list[tuple[int, int]], reason: str
) -> None:
    refused = _testing.RelayedPeer(15, pairs).refuses()
    assert (reason in refused and "the master" in refused) if reason else refused == ""
    play = _testing.MasterPlay(16, {"relays": 1})
    play.told()
    play.restart({3: pairs})
    out = gone(play)
    assert list(out) == ([3] if reason else [])
    assert all(reason in why and f"peer {bytes([3] * 4).hex()}" in why for why in out.values())


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=16))
def test_relays_are_taken_as_an_ascending_list_of_pairs(pairs: list[tuple[int, int]]) -> None:
    sound = pairs == sorted(set(pairs)) and all(a < b <= 4 for a, b in pairs)
    assert (_testing.RelayedPeer(4, pairs).refuses() == "") == sound


@pytest.mark.parametrize("others", [1, 6, 63])
def test_a_member_asks_for_relays_again_and_again_and_never_too_often(others: int) -> None:
    lonely = _testing.RelayedPeer(others, [(rank, others) for rank in range(others)])
    asked = lonely.asks(120)
    times = [time for time, _ in asked]
    assert _testing.allowed(256, 8, times) == len(times)  # what a master answers
    for number in range(1, others + 1):
        own = [time for time, about in asked if about == number]
        gaps = [later - time for time, later in itertools.pairwise(own)]
        assert own[0] < 0.1 and min(gaps) >= 1 and max(gaps) < max(1.2, 0.16 * others)


# Frames from one member, while three sum 100,000 float32: each combines 33 segments of 4 KiB.

ELEMENTS = 100_000
SEGMENT = 4096
FULL = 0xFFFFFFFF


def test_no_more_is_taken_than_was_granted() -> None:
    play = _testing.SumsPlay(ELEMENTS)
    play.start(0)
    taken = [play.data(1, 0, segment, SEGMENT) for segment in range(8)]
    window = taken.index("a segment that there was no room for yet")
    assert 0 < window < 8 and taken[:window] == ["store"] * window
    assert set(taken[window:]) == {"a segment that there was no room for yet"}
    # When one is combined there is room for another one.
    assert play.data(2, 0, 0, SEGMENT) == "store"
    assert play.data(1, 0, window, SEGMENT) == "store"
    assert "no room" in play.data(1, 0, window + 1, SEGMENT)


@pytest.mark.parametrize(
    ("segment", "size", "final", "reason"),
    [
        (FULL, SEGMENT, False, "beyond the operation's end"),
        (1 << 31, SEGMENT, True, "beyond the operation's end"),
        (0, SEGMENT + 4, False, "wrong length"),
        (0, 1 << 27, False, "wrong length"),
        (0, 0, False, "empty"),
        (40, SEGMENT, False, "makes none"),
        (0, SEGMENT, True, "does not have them"),
    ],
)
def test_what_has_no_place_in_an_operation_is_refused_before_a_byte_is_written(
    segment: int, size: int, final: bool, reason: str
) -> None:
    play = _testing.SumsPlay(ELEMENTS)
    play.start(0)
    assert reason in play.data(1, 0, segment, size, final=final)


def test_what_one_peer_says_of_later_attempts_takes_nothing_of_what_others_granted() -> None:
    play = _testing.SumsPlay(ELEMENTS)
    assert play.word(1, "ready", 0, attempt=1, credit=FULL) == ""
    assert play.word(2, "ready", 0, attempt=1 << 60, credit=FULL) == ""
    play.start(0)
    assert play.sends(1) > 0
    assert play.sends(2) == 0


def test_one_peer_cannot_use_up_the_room_for_what_others_say_early() -> None:
    play = _testing.SumsPlay(ELEMENTS)
    said = [play.word(2, "ready", number, 1, 1) for number in range((1 << 16) + 1)]
    assert not any(said[:-1]) and "too many" in said[-1]
    assert play.word(1, "ready", 1 << 20, 1, 1) == ""
    assert "too many" in play.data(2, 1 << 21, 0, 8, eager=True)
    assert play.data(1, 1 << 21, 0, 8, eager=True) == "store"


def test_who_asks_without_end_and_takes_no_answer_is_refused() -> None:
    play = _testing.SumsPlay(ELEMENTS)
    play.start(0)
    answers = {play.word(1, "ask", 0, 1, 0) for _ in range((1 << 16) + 10)}
    assert answers == {"", "more questions than answers were fetched"}


@given(st.lists(st.sampled_from([1, 7, 0xFFFFFFF0, FULL]), max_size=6))
def test_credits_never_wrap(credits: list[int]) -> None:
    play = _testing.SumsPlay(ELEMENTS)
    play.start(0)
    for credit in credits:
        assert play.word(1, "ready", 0, 1, credit) == ""
    all_of_them = _testing.SumsPlay(ELEMENTS)
    all_of_them.start(0)
    all_of_them.word(1, "ready", 0, 1, FULL)
    assert play.sends(1) == min(all_of_them.sends(1), sum(credits))
