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
    assert link.due(True) == "0"
    link.fails(False)


def test_a_member_whose_connection_breaks_dials_its_master_once_more() -> None:
    link = _testing.LinkPlay(3)
    lost_at(link)
    assert link.due(True) == "1"
    link.opens()
    link.welcome()
    for _ in range(2):
        link.fails(True)
        assert link.due(True) == "1"
        link.opens()
        link.welcome()


def test_a_member_leaves_a_silent_master_at_once() -> None:
    link = _testing.LinkPlay(3)
    assert link.due(True) == "0"
    link.opens()
    link.welcome()
    link.passes(6)  # PCCL_HEARTBEAT_TIMEOUT
    assert link.due(True) == "silent"
    link.fails(True)
    assert link.due(True) == "1"


def waits(link: _testing.LinkPlay, seconds: float) -> None:
    """So long, at a master that sends heartbeats."""
    link.passes(seconds)
    link.hears()


def unsure(link: _testing.LinkPlay) -> None:
    """A newcomer waits at the first of three masters for a run to begin; the last is silent."""
    while not link.may_found():
        for address, recovers in (("0", False), ("1", False), ("2", None)):
            answers(link, address, recovers)
        link.passes(1)
    assert link.due(False) == "0"
    link.opens()
    link.welcome(waits=True)


def test_a_newcomer_that_waits_for_a_run_asks_the_other_masters_again() -> None:
    link = _testing.LinkPlay(3)
    unsure(link)
    assert link.due(False) == ""
    for _ in range(2):
        waits(link, 6 + 3 * 3)  # as long as members need to come to another master
        assert link.due(False) == "elsewhere"
        answers(link, "1", False)
        answers(link, "2", None)
        assert link.may_found()  # at once: it has asked twice, with that time between
        assert link.due(False) == "0"
        link.opens()
        link.welcome(waits=True)
    waits(link, 6 + 3 * 3)
    assert link.due(False) == "elsewhere"
    answers(link, "1", True)  # members are there
    answers(link, "2", None)
    assert not link.may_found()


def test_a_newcomer_whose_connection_breaks_while_it_waits_asks_all_others_first() -> None:
    link = _testing.LinkPlay(3)
    unsure(link)
    link.passes(100)
    link.fails(True)
    assert link.due(False) == "0" and not link.may_found()


def test_a_founder_looks_no_further_when_its_run_has_begun() -> None:
    link = _testing.LinkPlay(3)
    unsure(link)
    link.enters()
    waits(link, 100)
    assert link.due(True) == ""


def test_a_newcomer_to_which_all_masters_have_answered_waits_where_it_is() -> None:
    link = _testing.LinkPlay(3)
    for address in ("0", "1", "2"):
        answers(link, address, False)
    assert link.due(False) == "0" and link.may_found()
    link.opens()
    link.welcome(waits=True)
    waits(link, 1000)
    assert link.due(False) == ""


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
