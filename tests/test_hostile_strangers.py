"""Unidentified connections, and questions of strangers, stay within their bounds."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports import (
    INQUIRY,
    gone,
    text,
    u32,
)

from pccl import _testing

# Questions of strangers: who reaches them.


def test_each_question_has_its_time() -> None:
    play = _testing.MasterPlay(2)
    play.connect(9, "192.0.2.9")
    for _ in range(5):  # over a line on which each takes seconds
        play.says(9, INQUIRY, u32(0) + struct.pack("<H", 0) + text("pccl"))
        play.passes(4)
    assert 9 not in gone(play)
    play.passes(2)
    assert "handshake timeout" in gone(play)[9]


REACHED, BUSY = 1, 3


def asks(play: _testing.MasterPlay, connection: int, address: str) -> list[tuple[int, str]]:
    """The messages of the master since: it tries, or asks members to; or the answer's code."""
    play.connect(connection, address)
    play.says(connection, INQUIRY, u32(0) + struct.pack("<H", 4242) + text("pccl"))
    return [(to, what if what != "findings" else str(code)) for to, what, code, _ in play.told()]


LOOPBACK, PRIVATE, PUBLIC = 1, 2, 3
MEMBERS = ["127.0.0.1", "10.1.2.3", "203.0.113.7"]


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("203.0.113.9", [LOOPBACK, PRIVATE, PUBLIC]),
        ("2001:db8::9", [LOOPBACK, PRIVATE, PUBLIC]),
        ("::ffff:203.0.113.9", [LOOPBACK, PRIVATE, PUBLIC]),
        ("172.32.0.1", [LOOPBACK, PRIVATE, PUBLIC]),
        ("10.9.9.9", [LOOPBACK, PRIVATE]),
        ("172.16.0.1", [LOOPBACK, PRIVATE]),
        ("172.31.255.255", [LOOPBACK, PRIVATE]),
        ("192.168.1.1", [LOOPBACK, PRIVATE]),
        ("100.64.0.1", [LOOPBACK, PRIVATE]),
        ("fd00::1", [LOOPBACK, PRIVATE]),
        ("::ffff:10.9.9.9", [LOOPBACK, PRIVATE]),
        ("127.0.0.1", [LOOPBACK]),
        ("127.8.8.8", [LOOPBACK]),
        ("::1", [LOOPBACK]),
        ("::ffff:127.0.0.1", [LOOPBACK]),
        ("169.254.1.1", []),
        ("fe80::1", []),
        ("0.0.0.0", []),
        ("::", []),
        ("224.0.0.1", []),
    ],
)
def test_members_are_asked_only_where_the_address_means_the_same_host(
    address: str, asked: list[int]
) -> None:
    play = _testing.MasterPlay(3, {}, MEMBERS)
    told = asks(play, 9, address)
    assert [to for to, what in told if what == "try"] == asked
    assert (9, "tries") in told  # the master itself, which saw it


def test_who_asked_and_went_leaves_its_place_to_others() -> None:
    play = _testing.MasterPlay(1)
    for connection in range(10, 14):
        assert (connection, "tries") in asks(play, connection, "203.0.113.9")
    assert asks(play, 20, "203.0.113.9") == [(20, str(BUSY))]
    play.disconnect(12)
    assert (21, "tries") in asks(play, 21, "203.0.113.9")
    assert asks(play, 22, "203.0.113.9") == [(22, str(BUSY))]
    # Findings for the connection that went have no reader.
    play.tried(12, True)
    assert play.told() == []


def test_questions_one_after_the_other_are_not_without_end() -> None:
    play = _testing.MasterPlay(1)
    tried = 0
    for connection in range(10, 60):
        tried += (connection, "tries") in asks(play, connection, "203.0.113.9")
        play.disconnect(connection)
    assert tried == 16
    play.passes(3.0)
    play.told()
    assert (60, "tries") in asks(play, 60, "203.0.113.9")


# Connections that have not said who they are.


@given(
    st.lists(
        st.tuples(st.sampled_from(["in", "out", "holds"]), st.integers(0, 5), st.integers(0, 40)),
        max_size=150,
    )
)
def test_connections_that_say_nothing_stay_within_their_bounds(
    events: list[tuple[str, int, int]],
) -> None:
    room = _testing.Anteroom(10, 6, 100)
    inside: dict[int, tuple[int, int]] = {}
    for number, (what, address, size) in enumerate(events):
        chosen = sorted(inside)[size % len(inside)] if inside else 1 << 40
        if what == "in":
            room.enter(number, f"192.0.2.{address}")
            inside[number] = (address, 0)
        elif what == "out":
            room.leave(chosen)
            inside.pop(chosen, None)
        else:
            room.holds(chosen, size)
            if chosen in inside:
                inside[chosen] = (inside[chosen][0], size)
        while (goes := room.crowded()) is not None:
            room.leave(goes)
            del inside[goes]
        counts = [sum(a == at for a, _ in inside.values()) for at in range(6)]
        assert len(inside) == room.size() <= 10
        assert max(counts) <= 6
        assert sum(held for _, held in inside.values()) <= 100


def test_a_crowd_from_one_address_keeps_nobody_else_out() -> None:
    room = _testing.Anteroom(100, 50, 1 << 20)
    room.enter(0, "203.0.113.5")
    for number in range(1, 1000):
        room.enter(number, "::ffff:192.0.2.1")
        while (goes := room.crowded()) is not None:
            assert goes != 0
            room.leave(goes)
    assert room.size() == 51


def test_a_crowd_from_many_addresses_keeps_nobody_else_out() -> None:
    # Each has one connection: the oldest makes room, whatever its address is.
    for newcomer, crowd in (("10.0.0.1", "192.0.2.{}"), ("203.0.113.5", "192.0.2.{}")):
        room = _testing.Anteroom(100, 50, 1 << 20)
        for number in range(100):
            room.enter(number, crowd.format(number))
        assert room.crowded() is None
        room.enter(100, newcomer)
        for oldest in range(90):
            assert room.crowded() == oldest
            room.leave(oldest)
            room.enter(101 + oldest, crowd.format(101 + oldest))


def test_one_that_has_a_network_of_its_own_counts_as_one_address() -> None:
    room = _testing.Anteroom(100, 10, 1 << 20)
    for number in range(11):
        room.enter(number, f"2001:db8:1:2::{number:x}")
    assert room.crowded() == 0


@given(st.lists(st.floats(0, 2), min_size=1, max_size=100))
def test_an_allowance_is_never_exceeded(gaps: list[float]) -> None:
    times = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    count = _testing.allowed(5, 2, times)
    assert count <= 5 + 2 * (times[-1] - times[0]) + 1
    assert count >= min(5, len(times))
