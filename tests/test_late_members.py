"""Members that are late in a call, while the others are ready to wait for a time only."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from reports import (
    BARRIER,
    ENTER_ROUND,
    HEARTBEAT,
    OP_REPORT,
    gone,
    heartbeat,
    listed,
    op_state,
    u64,
)

from pccl import _testing

ALL = [1, 2, 3, 4]


class Play:
    """A master and members, some of which say how long they wait."""

    def __init__(self, count: int = 4) -> None:
        self.master = _testing.MasterPlay(count)

    def ready(self, members: Sequence[int], quorum: int = 750, grace: float = 2.0) -> None:
        for member in members:
            self.master.says(member, HEARTBEAT, heartbeat(quorum=quorum, grace=grace))

    def enter(self, *members: int, tag: int = 7) -> None:
        for member in members:
            self.master.says(member, OP_REPORT, listed([op_state(tag, "all_reduce")]))

    def passes(self, seconds: float) -> None:
        """Nobody says anything: a heartbeat would say again how long its sender waits."""
        self.master.passes(seconds, silent=list(range(1, 32)))

    def late(self) -> dict[int, str]:
        found = gone(self.master)
        assert all("it is late: " in why for why in found.values()), found
        return found


def test_the_others_have_the_grace_once_a_quorum_is_in() -> None:
    play = Play()
    play.ready(ALL)
    play.enter(1, 2)
    play.passes(3)
    assert not play.late()  # two are no quorum
    play.enter(3)
    play.passes(1.5)
    assert not play.late()
    play.passes(1)
    (why,) = play.late().values()
    assert "3 of 4 members have waited for it in collective #0 of tag 7" in why
    assert play.master.members() == [1, 2, 3]


def test_who_comes_within_the_grace_is_not_late() -> None:
    play = Play()
    play.ready(ALL)
    play.enter(1, 2, 3)
    play.passes(1.5)
    play.enter(4)
    play.passes(3)
    assert not play.late()
    assert play.master.members() == ALL


def test_rounds_have_late_members_too() -> None:
    play = Play()
    play.ready(ALL)
    for member in (1, 2, 4):
        play.master.says(member, ENTER_ROUND, bytes([BARRIER]) + u64(1, 0) + b"\0")
    play.passes(3)
    assert list(play.late()) == [3]


@pytest.mark.parametrize("ready", [[], [4], [1, 2], [1, 2, 4]])
def test_all_that_wait_must_be_ready_to_go_on(ready: list[int]) -> None:
    play = Play()
    play.ready(ready)
    play.enter(1, 2, 3)
    play.passes(5)
    assert not play.late()


def test_what_the_late_one_says_does_not_matter() -> None:
    play = Play()
    play.ready([1, 2, 3])
    play.enter(1, 2, 3)
    play.passes(3)
    assert list(play.late()) == [4]


def test_the_most_patient_of_those_that_wait_decides() -> None:
    play = Play()
    play.ready([1, 2])
    play.ready([3], grace=4)
    play.enter(1, 2, 3)
    play.passes(3)
    assert not play.late()
    play.passes(2)
    assert list(play.late()) == [4]


@pytest.mark.parametrize(("count", "quorum"), [(4, 1), (4, 500), (2, 1)])
def test_a_minority_puts_nobody_out(count: int, quorum: int) -> None:
    play = Play(count)
    play.ready(range(1, count + 1), quorum=quorum, grace=0)
    play.enter(*range(1, count // 2 + 1))
    play.passes(5)
    assert not play.late()
    assert play.master.members() == list(range(1, count + 1))


def test_a_member_can_become_patient_again() -> None:
    play = Play()
    play.ready(ALL, grace=1)
    play.enter(1, 2, 3)
    play.passes(0.5)
    play.ready([2], quorum=0)
    play.passes(1.5)
    assert not play.late()
    play.ready([2], grace=1)
    play.passes(1)
    assert not play.late()  # its grace begins anew, when the master looks next
    play.passes(1)
    assert list(play.late()) == [4]
