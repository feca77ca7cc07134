"""Members that misbehave, message by message: they lose their membership, and the others stay."""

from __future__ import annotations

import pytest
from reports import (
    ABORT,
    BARRIER,
    BLOCKED,
    ENTER_ROUND,
    HEARTBEAT,
    JOIN,
    LINK_REPORT,
    MEASURED,
    MENDED,
    NEIGHBOURHOOD,
    OP_REPORT,
    TRIED,
    WANT_RELAY,
    gone,
    heartbeat,
    join,
    link_report,
    listed,
    op_key,
    op_state,
    peer,
    text,
    u32,
    u64,
)

from pccl import _testing

# Messages that are allowed a few times: (message, payload, limit, words of the reason).
TOO_OFTEN = {
    "calls given up": (
        ABORT,
        lambda i: b"\x00" + op_key(i) + b"\x0e" + bytes(16),
        "aborts",
        "gives up",
    ),
    "links to nobody": (LINK_REPORT, lambda i: link_report(99, 1), "strays", "links to nobody"),
    "links to itself": (LINK_REPORT, lambda i: link_report(2, 1), "strays", "links to nobody"),
    "operations of another admission": (
        OP_REPORT,
        lambda i: listed([op_state(i, admission=7)]),
        "strays",
        "other admissions",
    ),
    "rounds of another admission": (
        ENTER_ROUND,
        lambda i: bytes([BARRIER]) + u64(7, i) + b"\x00",
        "strays",
        "other admissions",
    ),
    "neighbours that come and go": (
        NEIGHBOURHOOD,
        lambda i: listed([peer(1)] if i % 2 == 0 else []) + u32(0),
        "restarts",
        "stops sharing",
    ),
    "relays that are not due": (WANT_RELAY, lambda i: peer(1) + u32(1), "strays", "relays that no"),
    "heartbeats": (HEARTBEAT, lambda i: heartbeat(i), "talk", "floods"),
    "links that work": (LINK_REPORT, lambda i: link_report(1, 1, MENDED), "talk", "floods"),
    "calls given up that were none": (
        ABORT,
        lambda i: b"\x00" + op_key(1) + b"\x0e" + bytes(16),
        "talk",
        "floods",
    ),
    "the same operation": (OP_REPORT, lambda i: listed([op_state(1)]), "talk", "floods"),
    "an operation in turns": (
        OP_REPORT,
        lambda i: listed([op_state(1, attempt=i % 2)]),
        "talk",
        "floods",
    ),
    "attempts in no epoch": (
        OP_REPORT,
        lambda i: listed([op_state(1, attempt=i)]),
        "talk",
        "floods",
    ),
    "an operation done and not": (
        OP_REPORT,
        lambda i: listed([op_state(1, phase=i % 2)]),
        "talk",
        "floods",
    ),
    "the same round": (
        ENTER_ROUND,
        lambda i: bytes([BARRIER]) + u64(1, 1) + b"\x00",
        "talk",
        "floods",
    ),
    "answers to no question": (TRIED, lambda i: u64(i) + b"\x00" + text("x"), "talk", "floods"),
    "rates": (MEASURED, lambda i: listed([]) + u32(i, 1), "talk", "floods"),
    "operations that nobody else calls": (
        OP_REPORT,
        lambda i: listed([op_state(i)]),
        "max_open_calls",
        "too many calls open",
    ),
    "rounds that nobody else enters": (
        ENTER_ROUND,
        lambda i: bytes([BARRIER]) + u64(1, i) + b"\x00",
        "max_open_calls",
        "too many calls open",
    ),
}


@pytest.mark.parametrize("what", TOO_OFTEN)
def test_a_member_that_says_it_without_end_is_evicted_and_nobody_else(what: str) -> None:
    kind, payload, limit, reason = TOO_OFTEN[what]
    play = _testing.MasterPlay(3, {limit: 20})
    for i in range(15):
        play.says(2, kind, payload(i))
    assert play.members() == [1, 2, 3]  # what races allow costs nothing
    for i in range(15, 60):
        play.says(2, kind, payload(i))
    out = gone(play)
    assert list(out) == [2] and reason in out[2]
    assert play.members() == [1, 3]


def test_open_calls_of_one_member_do_not_put_out_another_that_calls_next() -> None:
    play = _testing.MasterPlay(3, {"max_open_calls": 20})
    play.says(2, OP_REPORT, listed([op_state(tag) for tag in range(20)]))
    play.says(3, OP_REPORT, listed([op_state(1000)]))
    assert list(gone(play)) == [2]
    # The honest one's operation is known.
    play.says(1, OP_REPORT, listed([op_state(1000)]))
    assert play.members() == [1, 3]


@pytest.mark.parametrize(
    ("kind", "payload", "reason"),
    [
        (NEIGHBOURHOOD, listed([peer(i % 250) for i in range(5000)]) + u32(0), "neighbours"),
        (BLOCKED, listed([b"\x00" + op_key(i) for i in range(2000)]) + bytes(3), "waits in"),
        (
            MEASURED,
            listed([peer(i % 250) + b"\x00" + u32(1, 1, 1) for i in range(5000)]) + u32(1, 1),
            "links",
        ),
        (WANT_RELAY, peer(1) + u32(0), "not due"),
        (WANT_RELAY, peer(1) + u32(1000), "not due"),
        (WANT_RELAY, peer(2) + u32(1), "not due"),
        (WANT_RELAY, peer(3) + u32(1), "not due"),  # the newer one of a pair asks
        (26, peer(1), "do not send"),
        (JOIN, join(2), "do not send"),
        (ENTER_ROUND, bytes([4]) + u64(1, 0) + b"\x00", "wrong payload"),
        (11, u64(1) + b"\x00" + u32(0) + text("") + u32(1), "do not send"),
    ],
)
def test_what_no_honest_member_says_costs_its_membership_at_once(
    kind: int, payload: bytes, reason: str
) -> None:
    play = _testing.MasterPlay(3)
    play.says(2, kind, payload)
    out = gone(play)
    assert list(out) == [2] and reason in out[2]
    assert play.members() == [1, 3]


def test_a_member_that_claims_what_was_never_decided_is_evicted() -> None:
    play = _testing.MasterPlay(3)
    play.says(2, HEARTBEAT, heartbeat(), ordinal=1 << 60)
    assert "never made" in gone(play)[2]
    assert play.members() == [1, 3]


def test_a_member_that_never_says_what_it_has_applied_is_evicted() -> None:
    play = _testing.MasterPlay(3, {"max_behind": 50})
    for tag in range(60):
        play.says(1, ABORT, b"\x00" + op_key(tag) + b"\x0e" + bytes(16))
        play.says(3, HEARTBEAT, heartbeat())
    play.passes(1, mute=[2])
    assert "follow" in gone(play)[2]
    assert play.members() == [1, 3]


def test_a_link_that_breaks_without_end_is_planned_around() -> None:
    play = _testing.MasterPlay(4, {"breaks": 3})
    for _ in range(3):
        play.says(2, LINK_REPORT, link_report(1, play.epoch()))
        play.passes(1)
        assert (0, 1) in play.links()
    play.says(2, LINK_REPORT, link_report(1, play.epoch()))
    play.passes(1)
    assert (0, 1) not in play.links()
    before = play.epoch()
    play.passes(3)
    assert play.epoch() == before
    assert play.members() == [1, 2, 3, 4]


def test_who_breaks_its_links_to_several_without_end_goes_and_not_its_victims() -> None:
    play = _testing.MasterPlay(3, {"breaks": 3})
    for _ in range(8):
        # Its victims report it, and it says nothing.
        for victim in (1, 3):
            if 2 in play.members():
                play.says(victim, LINK_REPORT, link_report(2, play.epoch()))
        play.passes(1)
    assert play.members() == [1, 3]
    assert "again and again" in gone(play)[2]


# Members that do not come to a call that others wait in.


def barrier(number: int) -> bytes:
    return bytes([BARRIER]) + u64(1, number) + b"\x00"


def test_those_who_wait_are_told_for_whom_after_ten_seconds_and_each_minute() -> None:
    play = _testing.MasterPlay(3)
    play.told()
    for member in (1, 3):
        play.says(member, ENTER_ROUND, barrier(0))
    told = []
    for second in range(140):
        play.passes(1)
        told += [(second + 1, to, text) for to, what, _, text in play.told() if what == "notice"]
    assert [(when, to) for when, to, _ in told] == [
        (when, to) for when in (10, 70, 130) for to in (1, 3)
    ]
    waits = f"waiting for 1 peer in barrier #0 for 70 s: rank 1 ({peer(2).hex()[:8]})"
    assert told[2][2] == waits


def test_one_line_tells_of_all_calls_that_wait_for_the_same_members() -> None:
    play = _testing.MasterPlay(3)
    play.told()
    told = []
    for second in range(110):
        if second in (0, 5, 30):
            for member in (1, 3):
                play.says(member, ENTER_ROUND, barrier((0, 5, 30).index(second)))
        play.passes(1)
        told += [
            (second + 1, text) for to, what, _, text in play.told() if what == "notice" and to == 1
        ]
    name = f"rank 1 ({peer(2).hex()[:8]})"
    assert told == [
        (10, f"waiting for 1 peer in barrier #0 for 10 s: {name}; and in 1 more call"),
        (40, f"waiting for 1 peer in barrier #0 for 40 s: {name}; and in 2 more calls"),
        (100, f"waiting for 1 peer in barrier #0 for 100 s: {name}; and in 2 more calls"),
    ]


def test_a_member_that_never_calls_is_out_after_half_an_hour() -> None:
    play = _testing.MasterPlay(3)
    for member in (1, 3):
        play.says(member, ENTER_ROUND, barrier(0))
    play.passes(1799)
    assert play.members() == [1, 2, 3]
    play.told()
    play.passes(2)
    assert play.members() == [1, 3]
    assert "waited too long for it in barrier #0" in gone(play)[2]


def test_a_call_that_most_members_never_make_ends_after_half_an_hour() -> None:
    play = _testing.MasterPlay(3)
    play.says(2, ENTER_ROUND, barrier(0))
    play.told()
    play.passes(1801)
    told = play.told()
    assert play.members() == [1, 2, 3]
    ends = [(to, text) for to, what, _, text in told if what == "outcome"]
    assert [to for to, _ in ends] == [1, 2, 3]
    names = f"rank 0 ({peer(1).hex()[:8]}), rank 2 ({peer(3).hex()[:8]})"
    assert all("more than half" in text and names in text for _, text in ends)
    play.passes(1801)
    assert not [what for _, what, *_ in play.told() if what in ("notice", "outcome")]
