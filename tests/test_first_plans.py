"""Round trips of connections: from the peers that make them to the first plan of a group."""

from __future__ import annotations

from collections.abc import Container

import pytest
from reports import (
    ENTER_ROUND,
    JOIN,
    MEASURED,
    NEIGHBOURHOOD,
    OP_REPORT,
    PREPARED,
    gone,
    join,
    listed,
    op_state,
    peer,
    u32,
    u64,
)

from pccl import _testing

NOTHING: tuple[list[tuple[int, bool, int, int]], int, int] = ([], 0, 0)
ADMIT = 0
FULL = 512 << 10  # bytes of a segment, where nothing is known
NEAR, FAR = 400, 90_000  # microseconds


def row(round_trips: dict[int, int]) -> bytes:
    """A Measured: microseconds by peer."""
    links = [peer(other) + b"\0" + u32(0, rtt, 0) for other, rtt in round_trips.items()]
    return listed(links) + u32(0, 0)


def between(a: int, b: int) -> int:
    """Peers with odd numbers are at one site, the others at another one."""
    return NEAR if a % 2 == b % 2 else FAR


def is_short(ring: list[int]) -> bool:
    """Only two neighbours in it are far from each other."""
    neighbours = zip(ring, ring[1:] + ring[:1], strict=True)
    return sum(between(a, b) == FAR for a, b in neighbours) == 2


def joins(play: _testing.MasterPlay, number: int, *, speaks: bool = True) -> None:
    """A newcomer connects to all members, and they let it in."""
    play.connect(number, f"192.0.2.{number}")
    play.says(number, JOIN, join(number))
    if speaks:
        play.says(
            number, MEASURED, row({other: between(number, other) for other in play.members()})
        )
    play.says(number, PREPARED, u64(play.epoch()) + listed([]))
    admission = play.epoch()
    for member in play.members():
        play.says(member, ENTER_ROUND, bytes([ADMIT]) + u64(admission, 0) + b"\0")
    assert number in play.members()


def group_of_four(speaks: Container[int] = (2, 3, 4)) -> _testing.MasterPlay:
    play = _testing.MasterPlay(1)
    for number in (2, 3, 4):
        joins(play, number, speaks=number in speaks)
    return play


def test_newcomers_bring_the_round_trips_of_their_connections() -> None:
    play = group_of_four()
    assert is_short(play.ring())
    assert play.segment_bytes() < FULL


def test_without_round_trips_the_ring_follows_the_order_of_joining() -> None:
    play = group_of_four(speaks=())
    assert play.ring() == [1, 2, 3, 4]
    assert play.segment_bytes() == FULL


def test_founders_are_planned_anew_as_soon_as_all_round_trips_are_known() -> None:
    play = _testing.MasterPlay(4)
    founded = play.epoch()
    for member in (2, 3, 4):
        assert play.epoch() == founded
        assert play.ring() == [1, 2, 3, 4]
        play.says(
            member, MEASURED, row({other: between(member, other) for other in range(1, member)})
        )
        play.passes(0.5)
    assert play.epoch() == founded + 1
    assert is_short(play.ring())
    # Only the first complete table is looked at at once.
    play.says(4, MEASURED, row({1: NEAR, 2: FAR}))
    play.passes(29)
    assert play.epoch() == founded + 1


def test_rates_are_looked_at_twice_also_where_the_first_plan_was_good_enough() -> None:
    play = group_of_four(speaks=(2, 3))
    planned = play.epoch()
    # It is as far from all as the master has guessed.
    play.says(4, MEASURED, row(dict.fromkeys((1, 2, 3), FAR)))
    play.passes(0.5)
    assert play.epoch() == planned
    # 4 has a slow line: that counts at the second look, half a minute after the first.
    for member in (1, 2, 3, 4):
        others = {1, 2, 3, 4} - {member}
        rates = {other: 1_000 if 4 in (member, other) else 60_000 for other in others}
        links = [peer(other) + b"\0" + u32(rate, FAR, 0) for other, rate in rates.items()]
        play.says(member, MEASURED, listed(links) + u32(*[max(rates.values())] * 2))
    play.passes(1)
    assert play.epoch() == planned
    play.passes(90)
    assert play.epoch() == planned + 1


def test_one_pair_of_ranks_is_enough_for_two_hosts() -> None:
    play = _testing.MasterPlay(8)
    host = {member: (member - 1) // 2 for member in range(1, 9)}
    for member in host:
        near = [peer(other) for other in host if other != member and host[other] == host[member]]
        play.says(member, NEIGHBOURHOOD, listed(near) + u32(0))
    before = play.epoch()
    for member in (3, 5, 7):  # the first rank of each host
        others = range(1, member, 2)
        play.says(member, MEASURED, row({o: between(host[member], host[o]) for o in others}))
    play.passes(0.5)
    assert play.epoch() == before + 1
    hosts = list(dict.fromkeys(host[member] for member in play.ring()))
    assert is_short(hosts)


def test_newcomers_of_a_large_group_bring_nothing() -> None:
    play = _testing.MasterPlay(65)
    joins(play, 80)
    assert play.segment_bytes() == FULL


@pytest.mark.parametrize("seconds", [0.5, 3])
def test_an_operation_starts_over_for_them_only_at_the_beginning(seconds: float) -> None:
    play = _testing.MasterPlay(4)
    founded = play.epoch()
    for member in (1, 2, 3, 4):
        play.says(member, OP_REPORT, listed([op_state(7)]))
    play.passes(seconds)
    for member in (2, 3, 4):
        play.says(
            member, MEASURED, row({other: between(member, other) for other in range(1, member)})
        )
    assert play.epoch() - founded == (1 if seconds < 2 else 0)


def test_what_a_member_has_measured_counts_more_than_what_it_brought() -> None:
    play = group_of_four()
    # 3 and 4 are at each other's site now.
    play.says(3, MEASURED, row({1: FAR, 2: NEAR}))
    play.says(4, MEASURED, row({1: NEAR, 2: FAR}))
    joins(play, 5, speaks=False)
    ring = play.ring()
    neighbours = [{a, b} for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]
    assert {1, 4} in neighbours
    assert {2, 3} in neighbours


def test_a_newcomer_with_more_links_than_there_are_peers_is_turned_away() -> None:
    play = _testing.MasterPlay(2, {"max_peers": 8})
    play.connect(9, "192.0.2.9")
    play.says(9, JOIN, join(9))
    play.says(9, MEASURED, row(dict.fromkeys(range(20, 29), FAR)))
    assert "more links than peers" in gone(play)[9]
    assert play.members() == [1, 2]


@pytest.mark.parametrize(
    ("connections", "row"),
    [
        ([300, 4_900], []),
        ([0, 0], []),
        ([300, 0, 5_000], [(0, False, 0, 300), (2, False, 0, 5_000)]),
    ],
    ids=["near", "unknown", "one is far"],
)
def test_round_trips_are_told_if_one_is_long(
    connections: list[int], row: list[tuple[int, bool, int, int]]
) -> None:
    assert _testing.first_round_trips(connections) == (row, 0, 0)


def test_one_connection_is_enough_to_know_a_round_trip() -> None:
    watcher = _testing.RateWatcher()
    assert watcher.connection(1, 90_000) == ([(1, False, 0, 90_000)], 0, 0)
    assert watcher.connection(1, 90_000) == NOTHING  # it has been said
    watcher = _testing.RateWatcher()
    watcher.know(0, 0, {1: (0, 90_000)})
    assert watcher.connection(1, 20) == NOTHING  # the table has what pings have shown
