"""The log of a group whose members return to a master that does not know it.

Member 7 is new: its log begins with its admission. 6 has not applied the two entries before that
yet, and 5 has applied more.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from reports import (
    LOG_PART,
    PROMISE,
    REJOIN,
    gone,
    listed,
    log_part,
    peer,
    record,
    u32,
    u64,
    verdict,
)

from pccl import _testing

GROUP, TERM = 7, 3
MEMBERS = [peer(5), peer(6), peer(7), peer(8)]
ADMISSIONS = [4, 6]  # ordinals of their entries: of 7, and in one test of 8


def epoch(ordinal: int) -> bytes:
    """The one in force after that entry."""
    number = 1 + sum(admission <= ordinal for admission in ADMISSIONS)
    return record(MEMBERS[: number + 1], epoch=number)


def entry(ordinal: int) -> bytes:
    if ordinal in ADMISSIONS:
        return u64(ordinal) + b"\0" + epoch(ordinal)
    return verdict(ordinal)


class Return:
    """To a restarted master (`masters=1`), or to the second of three."""

    def __init__(self, masters: int) -> None:
        self.several = masters > 1
        options = {"masters": masters, "place": 1} if self.several else {}
        self.play = _testing.MasterPlay(0, options)
        self.play.passes(2.5)  # a standby may be about to serve before that
        self.term = 0

    def come(self, applied: dict[int, int], silent: int = 0) -> None:
        """In this order, with the ordinal of what each has applied.

        They promise what they are asked for, but for `silent`.
        """
        term = TERM if self.several else 0
        for number, ordinal in applied.items():
            self.play.connect(number, f"192.0.2.{number}")
            what = peer(number) + u32(GROUP) + epoch(ordinal)
            self.play.says(number, REJOIN, what + u64(ordinal) + peer(number), term=term)
        if not self.several:
            return
        asked = {to: term for to, what, term, _ in self.play.told() if what == "ask_promise"}
        assert asked.keys() == applied.keys()
        self.term = asked[5]
        for number in applied.keys() - {silent}:
            self.play.says(number, PROMISE, listed([]), term=self.term)

    def sends(self, number: int, ordinals: Sequence[int]) -> None:
        """The master asks it for its log, and nobody else."""
        told = self.play.told()
        assert [(to, what) for to, what, *_ in told] == [(number, "request_log")], told
        log = [entry(ordinal) for ordinal in ordinals]
        self.play.says(number, LOG_PART, log_part(log, last=True), term=self.term)

    def goes_on_without(self) -> set[int]:
        """Members that are refused, or have to return."""
        told = self.play.told()
        assert self.play.has_group(GROUP)
        return {to for to, what, *_ in told if what in ("refused", "close")}

    def goes_on(self) -> None:
        """Nobody is refused or has to return again, and 6 gets what it lacks."""
        told = self.play.told()
        assert not [to for to, what, *_ in told if what in ("refused", "close")], told
        got = [what for to, what, *_ in told if to == 6 and what in ("verdict", "epoch")]
        assert got[:3] == ["verdict", "verdict", "epoch"], told
        assert self.play.has_group(GROUP)


@pytest.mark.parametrize("masters", [1, 3])
def test_the_log_comes_from_a_member_that_is_not_new(masters: int) -> None:
    back = Return(masters)
    back.come({7: 4, 6: 1, 5: 4})
    back.sends(5, [2, 3, 4])
    back.goes_on()


@pytest.mark.parametrize(("masters", "applied"), [(1, 3), (1, 4), (3, 4)])
def test_what_a_newcomer_lacks_comes_from_another_member(masters: int, applied: int) -> None:
    back = Return(masters)
    back.come({7: 5, 6: 1, 5: applied})
    back.sends(7, [4, 5])
    back.sends(5, range(2, applied + 1))
    back.goes_on()


def test_several_logs_are_put_together() -> None:
    back = Return(1)
    back.come({8: 7, 7: 6, 6: 1, 5: 4})
    back.sends(8, [6, 7])
    back.sends(7, [4, 5, 6])
    back.sends(5, [2, 3, 4])
    back.goes_on()


@pytest.mark.parametrize("masters", [1, 3])
def test_nobody_is_asked_for_what_all_have(masters: int) -> None:
    back = Return(masters)
    back.come({7: 5, 6: 3, 5: 4})
    back.sends(7, [4, 5])
    assert not back.goes_on_without()


@pytest.mark.parametrize("masters", [1, 3])
def test_the_others_do_not_wait_long_for_what_one_lacks(masters: int) -> None:
    back = Return(masters)
    back.come({7: 5, 6: 1, 5: 4})
    back.sends(7, [4, 5])
    assert [(to, what) for to, what, *_ in back.play.told()] == [(5, "request_log")]
    assert not back.play.has_group(GROUP)
    back.play.passes(1)
    assert back.goes_on_without() == {6}
    log = [entry(ordinal) for ordinal in (2, 3, 4)]
    back.play.says(5, LOG_PART, log_part(log, last=True), term=back.term)
    assert not back.goes_on_without()


def test_a_member_that_has_not_promised_is_not_asked() -> None:
    back = Return(3)
    back.come({7: 5, 6: 1, 5: 4}, silent=5)
    back.play.passes(0.5)  # a majority is enough then
    back.sends(7, [4, 5])
    assert 6 in back.goes_on_without()


def test_a_member_is_out_if_nobody_has_what_it_lacks() -> None:
    back = Return(1)
    back.come({7: 4, 6: 1})
    back.play.passes(1.5)  # two of three are enough then
    back.sends(7, [4])
    assert gone(back.play) == {6: "the run went on without this peer"}
