"""Members and strangers that misbehave, one message at a time: who goes for it, and that the others stay."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports import listed, log_part, rejoin, seal, text, u32, u64, verdict

from pccl import _testing

JOIN, REJOIN, REQUEST_ADMISSION, PREPARED, ENTER_ROUND, OP_REPORT, ABORT = range(7)
LINK_REPORT, BLOCKED, LEAVE, HEARTBEAT = range(7, 11)
WITHDRAW, NEIGHBOURHOOD, MEASURED, INQUIRY, TRIED, WANT_RELAY = 17, 18, 19, 20, 23, 24
LOG_PART = 29
BROKEN, UNREACHABLE, SILENT, MENDED, RELAYED = range(5)
BARRIER = 2
TIMEOUT, ENTERED = 0, 0


def peer(number: int) -> bytes:
    return bytes([number]) * 16


def op_key(tag: int, admission: int = 1) -> bytes:
    return u64(admission) + b"\x01" + u64(tag, 0)


def op_state(
    tag: int, what: str = "", admission: int = 1, attempt: int = 1, phase: int = ENTERED
) -> bytes:
    return op_key(tag, admission) + u64(attempt) + bytes([phase, 1]) + u64(5) + text(what)


def join(
    number: int, group: int = 0, hosts: list[str] | None = None, waiting: bool = True
) -> bytes:
    addresses = [text(host) + struct.pack("<H", 1) for host in hosts or ["192.0.2.1"]]
    founder = u32(group, 1) + bytes([waiting, 0])
    rest = text("pccl") + u32(0xFFFFFFFF) + bytes(16) + text("") + u32(0) + peer(number)
    return peer(number) + founder + listed(addresses) + rest


def link_report(about: int, epoch: int, state: int = BROKEN) -> bytes:
    return peer(about) + bytes([state]) + u64(epoch) + text("reset")


def gone(play: _testing.MasterPlay) -> dict[int, str]:
    """Who was put out since, and why."""
    return {connection: why for connection, what, _, why in play.told() if what == "refused"}


# What a member may say once, and not without end: (message, payload, limit, words of the reason).
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
        "come and go",
    ),
    "relays that are not due": (WANT_RELAY, lambda i: peer(1) + u32(1), "strays", "relays that no"),
    "heartbeats": (HEARTBEAT, lambda i: b"", "talk", "floods"),
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
        (11, u64(1) + b"\x00" + u32(0) + text(""), "do not send"),
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
    play.says(2, HEARTBEAT, b"", ordinal=1 << 60)
    assert "never made" in gone(play)[2]
    assert play.members() == [1, 3]


def test_a_member_that_never_says_what_it_has_applied_is_evicted() -> None:
    play = _testing.MasterPlay(3, {"max_behind": 50})
    for tag in range(60):
        play.says(1, ABORT, b"\x00" + op_key(tag) + b"\x0e" + bytes(16))
        play.says(3, HEARTBEAT, b"")
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


def test_a_newcomer_that_wants_and_wants_not_is_turned_away() -> None:
    play = _testing.MasterPlay(2, {"turns": 10})
    play.connect(9, "192.0.2.9")
    play.says(9, JOIN, join(9, waiting=False))
    for _ in range(20):
        play.says(9, REQUEST_ADMISSION, b"")
        play.says(9, WITHDRAW, b"")
    assert "make up its mind" in gone(play)[9]
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


# What one member's links bring, while three sum 100,000 float32: each combines a third, some 33 segments of 4 KiB.

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


def test_nobody_comes_back_as_a_member_that_he_is_not() -> None:
    play = _testing.MasterPlay(2)
    for connection, ticket in ((9, b"made up.........."[:16]), (10, seal(peer(1)))):
        play.connect(connection, "192.0.2.9")
        play.says(connection, REJOIN, rejoin(peer(1), 0, ticket=ticket))
        assert {to for to, *_ in play.told()} == {connection}
    # The seal that all know does not help either.
    play.connect(11, "192.0.2.9")
    play.says(11, REJOIN, rejoin(peer(1), 0).removesuffix(peer(1)) + seal(peer(1)))
    assert "does not hold together" in gone(play)[11]
    # It is still that member's own connection that counts.
    play.connect(12, "192.0.2.9")
    play.says(12, REJOIN, rejoin(peer(1), 0))
    assert (1, "close", 0, "") in play.told()
    assert play.members() == [1, 2]


@pytest.mark.parametrize("first", [True, False])
def test_who_comes_back_in_the_name_of_another_keeps_it_not_out(first: bool) -> None:
    """To a master that was restarted, and knows nobody: its record says which ticket is the right one."""
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
    "a gap": ([[verdict(1), verdict(3)]], "does not hold together"),
    "less than it has applied": ([[verdict(1)]], "does not hold together"),
    "more than it has applied": ([[verdict(n) for n in range(1, 8)]], "does not hold together"),
    "nothing, again": ([[], []], "does not hold together"),
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
    assert "did not come within" in list(out.values())[-1]
    # Then what the next one knows counts.
    play.passes(1)
    assert play.has_group(7)


def test_a_newcomer_that_has_not_heard_of_its_admission_joins_again() -> None:
    """Its control connection broke just then. Before, its id was in use, and it was refused for good."""
    play = _testing.MasterPlay(2)
    play.disconnect(2)
    play.connect(9, "192.0.2.2")
    play.says(9, JOIN, join(2), 0)
    assert play.members() == [1, 2] and 9 not in gone(play)
    play.says(9, HEARTBEAT, b"")  # it has applied all that there is
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
    play.says(9, JOIN, join(5).removesuffix(peer(5)) + seal(peer(5)))
    told = play.told()
    assert {to for to, what, *_ in told if what in ("refused", "close")} == {9}
    play.connect(10, "192.0.2.9")
    play.says(10, JOIN, join(5))
    assert (8, "close", 0, "") in play.told()


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
    """Who was told what since: the master tries it, or members are asked to; or the answer's code."""
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
    # What is found out for the one that went is nobody's.
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
        for gone in range(90):
            assert room.crowded() == gone
            room.leave(gone)
            room.enter(101 + gone, crowd.format(101 + gone))


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
