"""Newcomers and returning members that misbehave: they are refused, and the others stay."""

from __future__ import annotations

import pytest
from reports import (
    ABORT,
    BLOCKED,
    HEARTBEAT,
    JOIN,
    LEAVE,
    LOG_PART,
    REJOIN,
    REQUEST_ADMISSION,
    WITHDRAW,
    gone,
    heartbeat,
    join,
    listed,
    log_part,
    op_key,
    peer,
    rejoin,
    seal,
    text,
    verdict,
)

from pccl import _testing
from pccl._core import FIRST_PAIR


def test_a_newcomer_that_wants_and_wants_not_is_turned_away() -> None:
    play = _testing.MasterPlay(2, {"turns": 10})
    play.connect(9, "192.0.2.9")
    play.says(9, JOIN, join(9, waiting=False))
    for _ in range(20):
        play.says(9, REQUEST_ADMISSION, b"")
        play.says(9, WITHDRAW, b"")
    assert "asks for admission too often" in gone(play)[9]
    assert play.members() == [1, 2]


@pytest.mark.parametrize(
    "hosts", [["192.0.2.1"] * 70, ["x" * 2000, "y" * 100]], ids=["many", "long"]
)
def test_addresses_that_would_fill_every_epoch_are_refused(hosts: list[str]) -> None:
    play = _testing.MasterPlay(2)
    play.connect(9, "192.0.2.9")
    try:
        play.says(9, JOIN, join(9, hosts=hosts))
    except ValueError:
        return  # no string of ours is that long
    assert "at most" in gone(play)[9]


def test_groups_that_nobody_was_let_into_are_forgotten() -> None:
    play = _testing.MasterPlay(1)
    for group in range(1, 200):
        connection = 100 + group
        play.connect(connection, "192.0.2.9")
        play.says(connection, JOIN, join(9, group=group, waiting=False))
        assert play.has_group(group)
        play.says(connection, LEAVE, text(""))
        play.told()
        assert not play.has_group(group)


def test_a_pair_whose_last_member_stays_away_is_forgotten() -> None:
    play = _testing.MasterPlay(1)
    play.connect(9, "192.0.2.9")
    play.says(9, JOIN, join(9, group=FIRST_PAIR))
    play.told()
    play.disconnect(9)
    assert play.has_group(FIRST_PAIR)  # it may come back
    play.passes(12)  # PCCL_RECONNECT_TIMEOUT, and more
    assert not play.has_group(FIRST_PAIR)
    assert play.members() == [1]


# Those who say that they come back.


@pytest.mark.parametrize("term", [18, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF])
def test_a_term_that_no_restart_has_made_is_refused(term: int) -> None:
    play = _testing.MasterPlay(2)
    play.connect(9, "192.0.2.9")
    play.says(9, REJOIN, rejoin(peer(9), 7), term=term)
    assert f"term {term}" in gone(play)[9] and play.term() == 1
    # One that a replaced master may have had.
    play.connect(10, "192.0.2.9")
    play.says(10, REJOIN, rejoin(peer(10), 8), term=2)
    assert 10 not in gone(play) and play.term() == 3
    assert play.members() == [1, 2]


def test_a_report_of_names_that_are_none_is_refused() -> None:
    for name in ("two words", "new\nline", "x" * 65):
        play = _testing.MasterPlay(0)
        play.connect(9, "192.0.2.9")
        play.says(9, REJOIN, rejoin(peer(9), 7, name=name))
        assert "is inconsistent" in gone(play)[9]


def test_nobody_comes_back_as_a_member_that_he_is_not() -> None:
    play = _testing.MasterPlay(2)
    for connection, ticket in ((9, b"made up.........."[:16]), (10, seal(peer(1)))):
        play.connect(connection, "192.0.2.9")
        play.says(connection, REJOIN, rejoin(peer(1), 0, ticket=ticket))
        assert {to for to, *_ in play.told()} == {connection}
    # The seal that all know does not help either.
    play.connect(11, "192.0.2.9")
    play.says(11, REJOIN, rejoin(peer(1), 0).removesuffix(peer(1)) + seal(peer(1)))
    assert "is inconsistent" in gone(play)[11]
    # It is still that member's own connection that counts.
    play.connect(12, "192.0.2.9")
    play.says(12, REJOIN, rejoin(peer(1), 0))
    assert (1, "close", 0, "") in play.told()
    assert play.members() == [1, 2]


@pytest.mark.parametrize("first", [True, False])
def test_who_comes_back_in_the_name_of_another_keeps_it_not_out(first: bool) -> None:
    """The restarted master knows nobody: the record says which ticket is the right one."""
    play = _testing.MasterPlay(2)
    play.connect(9, "192.0.2.9")
    honest = rejoin(peer(5), 7, others=[peer(6)], applied=2)
    forged = rejoin(peer(5), 7, ticket=peer(9), others=[peer(6)])
    for connection in (5, 6):
        play.connect(connection, "192.0.2.1")
    said = [(9, forged), (5, honest)]
    for connection, what in said if first else said[::-1]:
        play.says(connection, REJOIN, what)
    assert not play.told()
    play.says(6, REJOIN, rejoin(peer(6), 7, others=[peer(5)], applied=0))
    assert [(to, what) for to, what, *_ in play.told()] == [(5, "request_log")]
    play.says(5, LOG_PART, log_part([verdict(1)], last=False))
    assert not play.told()
    play.says(5, LOG_PART, log_part([verdict(2)], last=True))
    assert gone(play) == {9: "the run went on without this peer"}


BAD_LOGS = {
    "a gap": ([[verdict(1), verdict(3)]], "is inconsistent"),
    "less than it has applied": ([[verdict(1)]], "is inconsistent"),
    "more than it has applied": ([[verdict(n) for n in range(1, 8)]], "is inconsistent"),
    "nothing, again": ([[], []], "is inconsistent"),
    "no end": ([[verdict(1)]] * 40, "too long"),
}


@pytest.mark.parametrize("parts, why", BAD_LOGS.values(), ids=BAD_LOGS)
def test_a_log_that_makes_no_sense_is_refused(parts: list[list[bytes]], why: str) -> None:
    play = _testing.MasterPlay(2, {"max_behind": 30})
    play.connect(9, "192.0.2.9")
    play.says(9, REJOIN, rejoin(peer(5), 7, applied=3))
    assert [(to, what) for to, what, *_ in play.told()] == [(9, "request_log")]
    for number, part in enumerate(parts):
        play.says(9, LOG_PART, log_part(part, last=number + 1 == len(parts) < 40))
    assert why in gone(play)[9]
    assert play.members() == [1, 2]


def three_come_back(play: _testing.MasterPlay) -> None:
    """5 and 6 to a restarted master, which asks 5 for its log; then 7, which knows more."""
    members = {5: 2, 6: 1, 7: 3}
    for member, applied in members.items():
        others = [peer(other) for other in members if other != member]
        play.connect(member, "192.0.2.1")
        if member == 7:
            play.passes(1.5)
            assert [(to, what) for to, what, *_ in play.told()] == [(5, "request_log")]
        play.says(member, REJOIN, rejoin(peer(member), 7, others=others, applied=applied))
    assert [(to, what) for to, what, *_ in play.told()] == [(7, "request_log")]


def test_a_log_that_comes_too_late_to_matter_costs_nobody_the_membership() -> None:
    play = _testing.MasterPlay(2)
    three_come_back(play)
    play.says(7, LOG_PART, log_part([verdict(n) for n in (1, 2, 3)], last=True))
    assert play.has_group(7)
    play.says(5, LOG_PART, log_part([verdict(1), verdict(2)], last=True))
    assert not gone(play)


@pytest.mark.parametrize("how", ["slowly", "again"])
def test_a_member_that_does_not_say_its_log_holds_nobody_up(how: str) -> None:
    play = _testing.MasterPlay(2)
    three_come_back(play)
    play.says(5, LOG_PART, log_part([verdict(1), verdict(2)], last=True))
    assert not play.has_group(7)
    out: dict[int, str] = {}
    for second in range(6):
        play.passes(1)
        if how == "slowly":
            play.says(7, LOG_PART, log_part([verdict(second + 1)], last=False))
        else:
            others = [peer(5), peer(6)]
            play.connect(20 + second, "192.0.2.1")
            play.says(20 + second, REJOIN, rejoin(peer(7), 7, others=others, applied=3))
        out |= gone(play)
    assert "did not arrive within" in next(iter(out.values()))
    # Then what the next one knows counts.
    play.passes(1)
    assert play.has_group(7)


def test_a_newcomer_that_has_not_heard_of_its_admission_joins_again() -> None:
    """Its control connection broke just then, and its id is still in use."""
    play = _testing.MasterPlay(2)
    play.disconnect(2)
    play.connect(9, "192.0.2.2")
    play.says(9, JOIN, join(2), 0)
    assert play.members() == [1, 2] and 9 not in gone(play)
    play.says(9, HEARTBEAT, heartbeat())  # it has applied all that there is
    play.disconnect(9)
    play.connect(10, "192.0.2.2")
    play.says(10, JOIN, join(2), 0)
    assert "is in use" in gone(play)[10]


def test_coming_back_without_end_is_a_flood() -> None:
    play = _testing.MasterPlay(2, {"talk": 1000})
    for connection in range(9, 39):
        play.connect(connection, "192.0.2.9")
        play.says(connection, REJOIN, rejoin(peer(1), 0, applied=0))
    assert "floods" in gone(play)[9 + 1000 // 65]
    assert play.members() == [2]


def test_to_be_sent_a_long_log_over_and_over_is_a_flood() -> None:
    play = _testing.MasterPlay(2, {"talk": 10_000})
    for i in range(4000):
        play.says(1, ABORT, b"\x00" + op_key(i) + b"\x0e" + bytes(16), 0)
    for connection in range(9, 20):
        play.connect(connection, "192.0.2.9")
        play.says(connection, REJOIN, rejoin(peer(1), 0, applied=0))
        if play.members() == [2]:
            break
    assert connection == 9 + (10_000 - 4000) // 1065
    assert "floods" in gone(play)[connection]


def test_replicas_that_nobody_has_keep_no_newcomers_out() -> None:
    play = _testing.MasterPlay(2)
    play.connect(9, "192.0.2.9")
    play.says(9, REJOIN, rejoin(peer(9), 3, others=[peer(8)], replicas=4))
    assert "went on without" in gone(play)[9]
    play.connect(10, "192.0.2.10")
    play.says(10, JOIN, join(10))
    assert 10 not in gone(play)


def test_long_lists_are_many_messages() -> None:
    play = _testing.MasterPlay(3, {"talk": 200})
    waits = listed([b"\x00" + op_key(tag) for tag in range(1000)]) + bytes(3)
    for _ in range(3):
        play.says(2, BLOCKED, waits)
    assert not gone(play)
    play.says(2, BLOCKED, waits)
    assert "floods" in gone(play)[2]


def test_nobody_joins_in_the_name_of_another_newcomer() -> None:
    play = _testing.MasterPlay(2)
    for connection in (8, 9):
        play.connect(connection, "192.0.2.9")
    play.says(8, JOIN, join(5))
    # Its seal is what all members are told of it.
    play.says(9, JOIN, join(5, ticket=seal(peer(5))))
    told = play.told()
    assert {to for to, what, *_ in told if what in ("refused", "close")} == {9}
    play.connect(10, "192.0.2.9")
    play.says(10, JOIN, join(5))
    assert (8, "close", 0, "") in play.told()
