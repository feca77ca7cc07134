"""A master with one address that was restarted, and does not know who was there before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from reports import (
    ABORT,
    JOIN,
    LOG_PART,
    OP_REPORT,
    REJOIN,
    gone,
    join,
    listed,
    log_part,
    op_key,
    op_state,
    peer,
    record,
    rejoin,
    u32,
    u64,
    verdict,
)

from pccl import _testing
from pccl._core import FIRST_PAIR

BEFORE = 4711  # the run that the master served before
TIMEOUT = 11
NEWCOMER = 9


class Restarted:
    """The master, members of the run that it served before, and newcomers."""

    def __init__(self, begun: int = 0) -> None:
        """`begun`: so many newcomers have begun a run."""
        self.play = _testing.MasterPlay(begun)
        self.play.told()
        self.connections = NEWCOMER - 1

    def enters(self, number: int, *, run: int = 0, waiting: bool = True) -> int:
        """A newcomer dials. Returns its connection."""
        self.connections += 1
        self.play.connect(self.connections, "192.0.2.9")
        self.play.says(self.connections, JOIN, join(number, waiting=waiting), 0, run=run)
        return self.connections

    def returns(
        self,
        number: int,
        applied: int = 1,
        epoch: int = 1,
        members: Sequence[int] = (5, 6, 7),
        group: int = 0,
        connection: int | None = None,
    ) -> None:
        """One of these members dials, on a connection of its number."""
        used = number if connection is None else connection
        what = record([peer(member) for member in members], epoch=epoch)
        report = peer(number) + u32(group) + what + u64(applied) + peer(number)
        self.play.connect(used, "192.0.2.1")
        self.play.says(used, REJOIN, report, 1, run=BEFORE)

    def is_rebuilt(self, source: int) -> bool:
        """Whether the member is asked for its log, and the group is there then."""
        self.play.passes(1.5)
        asked = [to for to, what, *_ in self.play.told() if what == "request_log"]
        if asked != [source]:
            return False
        self.play.says(source, LOG_PART, log_part([verdict(1)], last=True), 1)
        return self.play.has_group(0)


@pytest.mark.parametrize("waiting", [True, False], ids=["begins a run", "only waits"])
def test_a_newcomer_that_is_faster_than_the_members_does_not_end_their_run(waiting: bool) -> None:
    master = Restarted()
    newcomer = master.enters(NEWCOMER, waiting=waiting)
    assert (master.play.members() == [NEWCOMER]) == waiting
    for number in (5, 6, 7):
        master.returns(number)
    refused = gone(master.play)
    assert list(refused) == ([newcomer] if waiting else [])
    assert all("the members of the run" in why for why in refused.values())
    master.play.told()
    assert master.play.members() == []
    for number in (5, 6, 7):  # the log was asked for at once: all were there
        master.play.says(number, LOG_PART, log_part([verdict(1)], last=True), 1)
    assert master.play.members() == [5, 6, 7]


@pytest.mark.parametrize("pair", [False, True])
def test_a_few_members_do_not_end_the_run_that_newcomers_have_begun(pair: bool) -> None:
    master = Restarted()
    master.enters(NEWCOMER)
    master.returns(5)
    if pair:  # a majority of a group that does not matter
        for number in (7, 8):
            master.returns(number, members=(7, 8), group=FIRST_PAIR + 7)
    assert not gone(master.play)  # more may come
    master.play.passes(12, silent=[5])
    assert gone(master.play)[5] == "this master serves another run"
    assert master.play.members() == [NEWCOMER]
    master.returns(6)  # a run that has gone on for so long is not ended any more
    master.returns(7)
    assert set(gone(master.play)) == {6, 7}


def test_a_majority_of_few_does_not_end_the_run_of_many() -> None:
    master = Restarted(3)
    master.returns(5, members=(5,))
    assert not gone(master.play)
    master.play.passes(12, silent=[5])
    assert list(gone(master.play)) == [5]


def test_a_few_members_do_not_keep_newcomers_from_waiting_for_a_run_to_begin() -> None:
    master = Restarted()
    newcomer = master.enters(NEWCOMER, waiting=False)
    master.returns(5)
    assert not [to for to, what, *_ in master.play.told() if to == newcomer and what == "close"]


def test_members_return_though_the_newcomers_have_left() -> None:
    master = Restarted()
    newcomer = master.enters(NEWCOMER, waiting=False)
    master.returns(5)
    master.play.disconnect(newcomer)
    master.returns(6)
    assert not gone(master.play)
    assert master.is_rebuilt(5)


def test_a_member_that_was_here_for_a_moment_changes_nothing() -> None:
    master = Restarted()
    master.returns(5)
    master.play.disconnect(5)
    newcomer = master.enters(NEWCOMER)
    for number in (5, 6, 7):
        master.returns(number)
    assert list(gone(master.play)) == [newcomer]


def test_a_member_that_dials_twice_is_kept_once() -> None:
    master = Restarted()
    master.enters(NEWCOMER)
    master.returns(5)
    master.returns(5, connection=25)
    assert [(to, what) for to, what, *_ in master.play.told()][-1:] == [(5, "close")]


def test_a_peer_that_waited_for_a_run_to_begin_may_begin_it_after_a_restart() -> None:
    master = Restarted()
    first = master.enters(NEWCOMER, run=BEFORE)
    assert [(to, what) for to, what, *_ in master.play.told()] == [(first, "close")]
    assert not master.play.has_group(0)  # members of that run may be on their way
    master.play.passes(2.5)
    master.enters(NEWCOMER, run=BEFORE)
    assert master.play.members() == [NEWCOMER]


@pytest.mark.parametrize(
    ("tag", "epoch"), [(3, 1), (4, 1), (4, 2)], ids=["same call", "another call", "an epoch"]
)
def test_a_member_with_a_decision_of_its_own_is_no_member(tag: int, epoch: int) -> None:
    """The master before had told it alone, before this one has decided something else."""
    master = Restarted()
    for number in (5, 6):
        master.returns(number)
    assert master.is_rebuilt(5)
    for number in (5, 6):
        master.play.says(number, OP_REPORT, listed([op_state(tag, "x")]), 1)
    master.play.says(5, ABORT, b"\0" + op_key(tag) + bytes([TIMEOUT]) + bytes(16), 1)
    assert {what for _, what, *_ in master.play.told()} == {"verdict"}
    master.returns(7, applied=2, epoch=epoch)
    assert gone(master.play) == {7: "the run went on without this peer"}


def test_a_member_that_knows_less_or_followed_this_master_returns() -> None:
    master = Restarted()
    for number in (5, 6):
        master.returns(number)
    assert master.is_rebuilt(5)
    for number in (5, 6):
        master.play.says(number, OP_REPORT, listed([op_state(4, "x")]), 1)
    master.play.says(5, ABORT, b"\0" + op_key(4) + bytes([TIMEOUT]) + bytes(16), 1)
    master.returns(7, applied=1)
    master.play.connect(60, "192.0.2.1")
    again = rejoin(peer(6), 0, others=[peer(5), peer(7)], applied=2)
    master.play.says(60, REJOIN, again, 2, term=master.play.term(), run=BEFORE)
    assert not gone(master.play)
