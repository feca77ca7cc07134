"""When a peer of a run with several masters dials which one, and when it gives up."""

from __future__ import annotations

from pccl import _testing


def answers(link: _testing.LinkPlay, address: str, recovers: bool | None) -> None:
    """The peer dials that address. `recovers`: of its NotServing; None: it does not answer."""
    assert link.due(False) == address
    if recovers is None:
        return link.fails(False)
    link.opens()
    link.not_serving(recovers)


def test_a_newcomer_that_makes_way_goes_on_looking() -> None:
    link = _testing.LinkPlay(3)
    assert link.due(False) == "0"
    link.opens()
    link.welcome()
    link.passes(30)  # it waits for others
    link.not_serving(True)
    assert link.due(False) == "1"


def test_a_run_may_be_founded_when_all_other_masters_are_idle() -> None:
    link = _testing.LinkPlay(3)
    for address, recovers in (("0", True), ("1", False), ("2", False)):
        assert not link.may_found()
        answers(link, address, recovers)
    assert link.may_found()
    answers(link, "0", False)  # it serves another run
    answers(link, "1", True)
    assert not link.may_found()


def test_a_master_that_does_not_answer_delays_the_founding() -> None:
    link = _testing.LinkPlay(3)
    seconds = 0
    while not link.may_found():
        for address, recovers in (("0", False), ("1", False), ("2", None)):
            answers(link, address, recovers)
        link.passes(1)
        seconds += 1
        assert seconds < 20
    assert seconds > 6 + 3 * 3  # PCCL_HEARTBEAT_TIMEOUT, and 3 s for each address
    assert link.failures() == 0  # the first one answers
    answers(link, "0", False)
    answers(link, "1", False)
    answers(link, "2", None)
    assert link.failures() == 1  # and refused


def test_a_newcomer_waits_longer_for_a_master_than_a_member() -> None:
    for member, limit in ((True, 10), (False, 10 + 6 + 3 * 3)):
        link = _testing.LinkPlay(3)
        assert link.due(member) == "0"
        link.opens()
        link.welcome()
        link.fails(True)
        seconds = 0
        while (due := link.due(member)) != "lost":
            if due:
                link.fails(False)
            link.passes(1)
            seconds += 1
        assert seconds == limit


def lost_at(link: _testing.LinkPlay) -> None:
    """A member is at the first of the masters, and that one is gone."""
    assert link.due(True) == "0"
    link.opens()
    link.welcome()
    link.fails(True)


def test_a_member_that_is_refused_asks_the_other_masters() -> None:
    link = _testing.LinkPlay(3)
    lost_at(link)
    assert link.due(True) == "1"
    link.opens()
    link.refuses()
    assert link.due(True) == "2" and link.refused()
    link.opens()
    link.welcome()
    assert not link.refused() and link.due(True) == ""


def test_a_member_that_all_masters_refuse_is_out() -> None:
    link = _testing.LinkPlay(3)
    lost_at(link)
    for address in ("1", "2", "0"):
        assert link.due(True) == address
        link.opens()
        link.refuses()
    assert link.due(True) == "lost" and link.refused()


def test_a_member_that_one_master_refuses_looks_for_another_one_until_the_end() -> None:
    link = _testing.LinkPlay(3)
    lost_at(link)
    seconds = 0
    while (due := link.due(True)) != "lost":
        if due == "1":
            link.opens()
            link.refuses()
        elif due:
            link.fails(False)
        else:
            link.passes(1)
            seconds += 1
    assert seconds == 10 and link.refused()  # PCCL_RECONNECT_TIMEOUT
