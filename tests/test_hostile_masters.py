"""Runs with several masters: peers that say what is not true to a standby or to one that serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from reports import (
    ACCEPT,
    COMMAND,
    JOIN,
    LOG_PART,
    MAY_FOUND,
    PROMISE,
    REJOIN,
    gone,
    join,
    listed,
    log_part,
    peer,
    record,
    text,
    u32,
    u64,
    verdict,
)

from pccl import _core, _testing

THREE = [peer(1), peer(2), peer(3)]
TERM = 3  # the members have followed the first of three masters in it
KICK, PAUSE = 0, 2  # the numbers of these commands
NEXT = 7  # the first term of the second master above that


def standby(**limits: int) -> _testing.MasterPlay:
    play = _testing.MasterPlay(0, {"masters": 3, "place": 1, **limits})
    play.passes(2.5)  # before that it may be about to serve
    return play


def comes(
    play: _testing.MasterPlay,
    number: int,
    term: int = TERM,
    members: Sequence[bytes] = THREE,
    applied: int = 1,
    epoch: int = 1,
    group: int = 0,
    run: int | None = None,
) -> None:
    """The member with this number returns, on the connection of its number."""
    play.connect(number, f"192.0.2.{number}")
    report = peer(number) + u32(group) + record(members, epoch=epoch) + u64(applied) + peer(number)
    play.says(number, REJOIN, report, term=term, run=run)


def asked(play: _testing.MasterPlay) -> dict[int, int]:
    """Whom the master has asked for a promise, with the term."""
    return {to: term for to, what, term, _ in play.told() if what == "ask_promise"}


def accepted(term: int, ordinal: int, what: bytes) -> bytes:
    return listed([u32(term) + u64(ordinal) + b"\0" + what])


def promised(play: _testing.MasterPlay, numbers: Sequence[int], term: int) -> int:
    """These promise, and have accepted nothing; the one that is asked sends its log: its number."""
    for number in numbers:
        play.says(number, PROMISE, listed([]), term=term)
    (source,) = {to for to, what, *_ in play.told() if what == "request_log"}
    play.says(source, LOG_PART, log_part([], last=True), term=term)
    return source


def serving() -> _testing.MasterPlay:
    """A standby that has taken over from all three members."""
    play = standby()
    for number in (1, 2, 3):
        comes(play, number)
    assert asked(play) == dict.fromkeys((1, 2, 3), NEXT)
    promised(play, (1, 2, 3), NEXT)
    assert sorted(to for to, what, *_ in play.told() if what == "propose") == [1, 2, 3]
    for number in (1, 2):
        play.says(number, ACCEPT, u64(2), term=NEXT)
    assert play.members() == [1, 2, 3] and play.epoch() == 2
    assert sorted(to for to, what, *_ in play.told() if what == "epoch") == [1, 2, 3]
    return play


def test_a_standby_takes_over_when_a_majority_has_promised() -> None:
    serving()


def test_an_epoch_is_not_sent_before_a_majority_has_accepted_it() -> None:
    play = serving()
    play.disconnect(3)
    play.connect(4, "192.0.2.4")
    play.says(4, JOIN, join(4), 0, term=0)
    play.told()
    what: list[tuple[int, str]] = []
    while not what:  # until the third one is evicted
        play.passes(0.5, silent=[3])
        what = [(to, said) for to, said, *_ in play.told() if said in ("propose", "epoch")]
    assert sorted(what) == [(1, "propose"), (2, "propose")]
    play.says(1, ACCEPT, u64(3), term=NEXT)
    play.says(1, ACCEPT, u64(3), term=NEXT)  # once more is no other vote
    play.says(4, ACCEPT, u64(3), term=NEXT)  # nor is that of a newcomer
    play.says(2, ACCEPT, u64(2), term=NEXT)  # nor one for another entry
    assert not [said for _, said, *_ in play.told() if said == "epoch"]
    play.says(2, ACCEPT, u64(3), term=NEXT)
    assert sorted(to for to, said, *_ in play.told() if said == "epoch") == [1, 2]


def test_members_that_are_evicted_vote_first() -> None:
    play = serving()
    told: list[tuple[int, str, int, str]] = []
    while not any(what == "propose" for _, what, *_ in told):
        play.passes(0.5, silent=[2, 3])
        told = play.told()
    # One of three is left, and no majority without them.
    assert sorted(to for to, what, *_ in told if what == "propose") == [1, 2, 3]
    assert not [what for _, what, *_ in told if what in ("refused", "close")]
    for number in (1, 2):
        play.says(number, ACCEPT, u64(3), term=NEXT)
    assert sorted(gone(play)) == [2, 3]
    assert play.members() == [1]


def test_a_member_that_sends_garbage_is_told_when_its_eviction_is_decided() -> None:
    play = serving()
    play.says(3, ACCEPT, u64(2), term=NEXT, run=1)
    assert {what for _, what, *_ in play.told()} == {"propose"}
    for number in (1, 2):
        play.says(number, ACCEPT, u64(3), term=NEXT)
    assert gone(play) == {3: "protocol misuse: a message of another run"}


def test_the_newest_of_the_accepted_epochs_is_proposed_again() -> None:
    # The first member has not learned yet that epoch 2 was decided; the second one has, and has
    # accepted another one in the same term. The third one is lost.
    play = standby()
    comes(play, 1)
    comes(play, 2, applied=2, epoch=2)
    play.passes(0.5)
    assert asked(play) == dict.fromkeys((1, 2), NEXT)
    play.says(1, PROMISE, accepted(TERM, 2, record(THREE, epoch=2)), term=NEXT)
    play.says(2, PROMISE, accepted(TERM, 3, record([peer(1), peer(2)], epoch=3)), term=NEXT)
    assert [to for to, what, *_ in play.told() if what == "request_log"] == [2]
    play.says(2, LOG_PART, log_part([], last=True), term=NEXT)
    assert {to for to, what, *_ in play.told() if what == "propose"} == {1, 2}
    for ordinal in (3, 4):  # that one, and the first one of the new term
        for number in (1, 2):
            play.says(number, ACCEPT, u64(ordinal), term=NEXT)
    assert play.members() == [1, 2] and play.epoch() == 4


@pytest.mark.parametrize(
    ("term", "ordinal", "what"),
    [
        (TERM, 2, record(THREE, epoch=2, relayed=[(7, 9)])),
        (TERM, 2, record(THREE, epoch=2, relayed=[(0, 1), (0, 1)])),
        (TERM, 2, record(THREE, epoch=9)),
        (TERM, 5, record(THREE, epoch=2)),
        (TERM, 2, record([peer(1), peer(1)], epoch=2)),
        (NEXT, 2, record(THREE, epoch=2)),
        (900, 2, record(THREE, epoch=2)),
    ],
    ids=["foreign pair", "pair twice", "epoch", "ordinal", "member twice", "term", "later term"],
)
def test_a_promise_that_makes_no_sense_costs_its_peer_the_membership(
    term: int, ordinal: int, what: bytes
) -> None:
    play = standby()
    for number in (1, 2, 3):
        comes(play, number)
    asked(play)
    play.says(3, PROMISE, accepted(term, ordinal, what), term=NEXT)
    assert gone(play) == {3: "its promise is inconsistent"}
    # The others do without it, after they have waited for it to come back.
    for number in (1, 2):
        play.says(number, PROMISE, listed([]), term=NEXT)
    assert not play.told()
    play.passes(0.5)
    assert [what for _, what, *_ in play.told()] == ["request_log"]


def test_two_promises_of_one_peer_are_refused_and_an_entry_is_no_epoch() -> None:
    for promise in (
        listed([accepted(TERM, 2, record(THREE, epoch=2))[4:]] * 2),
        listed([u32(TERM) + verdict(2)]),
    ):
        play = standby()
        for number in (1, 2, 3):
            comes(play, number)
        asked(play)
        play.says(2, PROMISE, promise, term=NEXT)
        assert gone(play) == {2: "its promise is inconsistent"}


def test_promises_count_against_the_memory_for_reports() -> None:
    play = standby(max_reported_bytes=4000)
    for number in (1, 2, 3):
        comes(play, number)
    asked(play)
    for number in (1, 2, 3):
        many = [peer(1), peer(2), *(peer(number * 40 + other) for other in range(20))]
        play.says(number, PROMISE, accepted(TERM, 2, record(many, epoch=2)), term=NEXT)
    closed = {to for to, what, *_ in play.told() if what == "close"}
    assert closed and len(closed) < 3


def test_a_term_that_no_master_can_have_is_not_followed() -> None:
    play = standby()
    for number in (1, 2):
        comes(play, number)
    comes(play, 3, term=1_000_000_000)
    assert set(asked(play).values()) == {NEXT}
    # Nor when it comes again and again.
    for _ in range(5):
        comes(play, 3, term=1_000_000_000)
        assert set(asked(play).values()) <= {NEXT}
        play.disconnect(3)


@pytest.mark.parametrize("term", [TERM, NEXT], ids=["same term", "later term"])
@pytest.mark.parametrize(
    ("members", "epoch"),
    [(THREE, 2), (THREE, 9), ([peer(3), peer(1)], 2), ([peer(3)], 9), ([peer(3), peer(4)], 9)],
    ids=["next", "far", "two of three", "alone", "with a stranger"],
)
def test_a_false_later_epoch_of_one_member_is_not_taken_over(
    members: Sequence[bytes], epoch: int, term: int
) -> None:
    play = standby()
    for number in (1, 2):
        comes(play, number)
    comes(play, 3, term=term, members=members, epoch=epoch, applied=epoch)
    promises = asked(play)
    assert set(promises) == {1, 2, 3}
    (new,) = set(promises.values())
    assert promised(play, (1, 2, 3), new) in (1, 2)
    told = play.told()
    assert [to for to, what, *_ in told if what == "close"] == [3]
    assert sorted(to for to, what, *_ in told if what == "propose") == [1, 2]
    for number in (1, 2):
        play.says(number, ACCEPT, u64(2), term=new)
    assert sorted(to for to, what, *_ in play.told() if what == "epoch") == [1, 2]
    assert play.members() == [1, 2, 3] and play.epoch() == 2  # the one after the true one
    # The others go on: they evict that member once its connection is gone for long enough.
    play.disconnect(3)
    what: list[tuple[int, str]] = []
    while not what:
        play.passes(0.5)
        what = [(to, said) for to, said, *_ in play.told() if said == "propose"]
    assert sorted(to for to, _ in what) == [1, 2]
    for number in (1, 2):
        play.says(number, ACCEPT, u64(3), term=new)
    assert play.members() == [1, 2] and play.epoch() == 3
    comes(play, 3, term=new, members=members, epoch=epoch, applied=epoch)
    play.passes(1.1)  # no other members of that epoch come
    assert gone(play) == {3: "the run went on without this peer"}
    assert play.members() == [1, 2]


@pytest.mark.parametrize("comes_late", [True, False])
def test_a_false_epoch_does_not_hurry_a_takeover(comes_late: bool) -> None:
    play = standby()
    comes(play, 9, members=[peer(9)], epoch=9)  # all members of that epoch are here
    for number in (1, 2):
        comes(play, number)
    for number in (1, 2, 9):
        play.says(number, PROMISE, listed([]), term=NEXT)
    assert not [what for _, what, *_ in play.told() if what == "request_log"]
    if comes_late:  # it has applied more than the others
        comes(play, 3, applied=2)
        play.says(3, PROMISE, listed([]), term=NEXT)
        assert [to for to, what, *_ in play.told() if what == "request_log"] == [3]
    else:
        play.passes(0.5)
        (source,) = (to for to, what, *_ in play.told() if what == "request_log")
        assert source in (1, 2)


def test_a_master_that_serves_steps_down_only_for_members() -> None:
    play = serving()
    comes(play, 9, term=NEXT + 1, members=[peer(9)])
    play.passes(1.1)
    assert {to for to, what, *_ in play.told() if what == "close"} == {9}
    assert play.members() == [1, 2, 3]
    play.disconnect(3)
    comes(play, 3, term=NEXT + 1)
    assert {to for to, what, *_ in play.told() if what == "close"} == {1, 2}
    assert not play.has_group(0) or play.members() == []


def lied_to(term: int = TERM, epoch: int = 9) -> _testing.MasterPlay:
    """A standby that serves an epoch of a single peer, number 9, which never was."""
    play = standby()
    comes(play, 9, term=term, members=[peer(9)], epoch=epoch, applied=epoch)
    goes_on(play, 9, asked(play)[9], epoch + 1)
    assert play.members() == [9]
    return play


def goes_on(play: _testing.MasterPlay, liar: int, term: int, epoch: int) -> None:
    play.says(liar, PROMISE, listed([]), term=term)
    play.says(liar, LOG_PART, log_part([], last=True), term=term)
    play.says(liar, ACCEPT, u64(epoch), term=term)
    play.told()


def test_a_master_gives_way_to_more_members_of_another_epoch() -> None:
    play = lied_to()
    comes(play, 1)
    assert play.told() == [] and play.members() == [9]
    comes(play, 2)  # two of three, and more than one
    told = play.told()
    assert [to for to, what, *_ in told if what == "close"] == [9]
    play.disconnect(9)
    play.passes(0.5)  # the third one does not come
    term = dict.fromkeys((1, 2), NEXT + 3)
    assert asked(play) == term
    # The liar comes again, before these two have promised.
    comes(play, 9, term=NEXT, members=[peer(9)], epoch=10, applied=10)
    assert asked(play) == {9: NEXT + 3}
    promised(play, (9, 1, 2), NEXT + 3)
    for number in (1, 2):
        play.says(number, ACCEPT, u64(2), term=NEXT + 3)
    assert play.members() == [1, 2, 3] and play.epoch() == 2


def test_members_of_another_epoch_wait_for_each_other_for_a_second() -> None:
    play = lied_to()
    for number in (1, 2):
        comes(play, number)
        play.passes(0.5)
        assert gone(play) == {}
        play.passes(0.6)
        assert gone(play) == {number: "the run went on without this peer"}
        play.disconnect(number)
    assert play.members() == [9]


def test_a_master_does_not_give_way_to_as_many_members_as_it_has() -> None:
    play = lied_to()
    comes(play, 8, members=[peer(8)])
    play.passes(1.1)
    assert gone(play) == {8: "the run went on without this peer"}
    play = serving()
    for number in (7, 8, 9):
        comes(play, number, members=[peer(7), peer(8), peer(9)])
    play.passes(1.1)
    assert set(gone(play)) == {7, 8, 9} and play.members() == [1, 2, 3]
    # Nor to some members of a large epoch.
    for number in (6, 7, 8, 9):
        comes(play, number, members=[peer(10 + other) for other in range(4)] + [peer(number)])
    play.passes(1.1)
    assert play.members() == [1, 2, 3]


def test_strangers_do_not_keep_the_run_busy() -> None:
    play = serving()
    strangers = [6, 7, 8, 9]
    term, epoch = NEXT, 2
    for _ in range(4):
        for number in strangers:
            comes(play, number, term=term, members=[peer(other) for other in strangers])
        assert {1, 2, 3} <= {to for to, what, *_ in play.told() if what == "close"}
        for number in strangers:
            play.disconnect(number)
        for number in (1, 2, 3):
            comes(play, number, term=term, applied=epoch, epoch=epoch)
        ((term, _),) = Counter(asked(play).values()).items()
        promised(play, (1, 2, 3), term)
        epoch += 1
        for number in (1, 2, 3):
            play.says(number, ACCEPT, u64(epoch), term=term)
        assert play.members() == [1, 2, 3] and play.epoch() == epoch
        play.told()
    for number in strangers:
        comes(play, number, term=term, members=[peer(other) for other in strangers])
    play.passes(1.1)
    assert set(gone(play)) == set(strangers) and play.members() == [1, 2, 3]


def test_a_false_epoch_does_not_win_over_a_proposal_in_flight() -> None:
    play = standby()
    proposal = accepted(TERM, 2, record(THREE, epoch=2))
    for number in (1, 2, 3):
        comes(play, number)
    comes(play, 9, members=[peer(9)], epoch=9, applied=9)
    (term,) = set(asked(play).values())
    for number in (1, 2, 3):
        play.says(number, PROMISE, proposal, term=term)
    play.says(9, PROMISE, listed([]), term=term)
    (source,) = {to for to, what, *_ in play.told() if what == "request_log"}
    assert source in (1, 2, 3)
    play.says(source, LOG_PART, log_part([], last=True), term=term)
    proposed = {to for to, what, *_ in play.told() if what == "propose"}
    assert proposed == {1, 2, 3}
    for number in (1, 2, 3):
        play.says(number, ACCEPT, u64(2), term=term)  # the proposal
        play.says(number, ACCEPT, u64(3), term=term)  # the first epoch of this master
    assert play.members() == [1, 2, 3] and play.epoch() == 3


def test_a_master_does_not_serve_twice_with_one_term() -> None:
    play = serving()
    for number in (1, 2, 3):
        play.disconnect(number)
    play.passes(20)
    # The members followed this master with that term, and would believe its refusal.
    comes(play, 9, term=TERM, members=[peer(9)], epoch=9, applied=9)
    assert asked(play) == {9: NEXT + 3}


def test_a_member_that_repeats_a_false_term_does_not_keep_the_run_busy() -> None:
    play = serving()
    term, epoch = NEXT, 2
    for _ in range(4):
        play.disconnect(3)
        comes(play, 3, term=term + 1, applied=epoch, epoch=epoch)
        assert {to for to, what, *_ in play.told() if what == "close"} == {1, 2}
        # The others come back at once.
        for number in (1, 2):
            comes(play, number, term=term, applied=epoch, epoch=epoch)
        term += 3
        epoch += 1
        assert asked(play) == dict.fromkeys((1, 2, 3), term)
        promised(play, (1, 2, 3), term)
        for number in (1, 2):
            play.says(number, ACCEPT, u64(epoch), term=term)
        assert play.epoch() == epoch and play.members() == [1, 2, 3]
        play.told()
    play.disconnect(3)
    comes(play, 3, term=term + 1, applied=epoch, epoch=epoch)
    assert {to for to, what, *_ in play.told() if what == "close"} == {3}
    play.passes(10, silent=[])
    play.told()
    comes(play, 3, term=term + 1, applied=epoch, epoch=epoch)
    assert {1, 2} <= {to for to, what, *_ in play.told() if what == "close"}


def test_a_pause_of_admission_ends_when_the_master_steps_down() -> None:
    play = serving()
    play.connect(90, "192.0.2.90")
    play.says(90, COMMAND, bytes([PAUSE]) + text(""))
    assert play.status()["paused"]
    play.disconnect(3)
    comes(play, 3, term=NEXT + 1)
    assert not play.status()["paused"]


def ordered(play: _testing.MasterPlay, kind: int, name: str = "") -> tuple[int, str]:
    """The master's answer to a command: whether it obeys, and what it says."""
    play.connect(90, "192.0.2.90")
    play.says(90, COMMAND, bytes([kind]) + text(name))
    (answer,) = ((done, said) for to, what, done, said in play.told() if what == "result")
    play.disconnect(90)
    return answer


def test_a_standby_obeys_no_command() -> None:
    play = standby()
    for kind in (KICK, PAUSE):
        assert ordered(play, kind, "b") == (0, "this master serves no peers now")
    assert not play.status()["paused"]


def test_a_pause_of_peers_that_wait_ends_when_members_of_a_run_come() -> None:
    play = founded({0: [9]}, waiting=False)
    assert ordered(play, PAUSE)[0] and play.status()["paused"]
    for number in (1, 2, 3):
        comes(play, number)
    promised(play, (1, 2, 3), max(asked(play).values()))
    assert play.members() == [1, 2, 3] and not play.status()["paused"]


def test_the_only_member_is_kicked_by_a_master_that_has_taken_over() -> None:
    play = standby()
    comes(play, 1, members=[peer(1)], run=5)
    promised(play, [1], asked(play)[1])
    play.says(1, ACCEPT, u64(2), term=NEXT)
    assert play.members() == [1]
    play.told()
    play.connect(90, "192.0.2.90")
    play.says(90, COMMAND, bytes([KICK]) + text(peer(1).hex()))
    assert {what for to, what, *_ in play.told() if to == 1} == {"propose"}
    play.disconnect(90)  # before the member has answered
    play.says(1, ACCEPT, u64(3), term=NEXT)
    assert gone(play) == {1: "kicked by the operator"}


def test_the_accepted_end_of_a_group_is_told_to_its_members() -> None:
    play = standby()
    for number in (1, 2, 3):
        comes(play, number)
    reasons = {number: f"reason {number}" for number in (1, 2, 3)}
    end = record([], epoch=2, gone=[(peer(number), why) for number, why in reasons.items()])
    assert set(asked(play)) == {1, 2, 3}
    for number in (1, 2):  # they were frozen together, with the third one, until they were evicted
        play.says(number, PROMISE, accepted(TERM, 2, end), term=NEXT)
    assert gone(play) == {}
    play.says(3, PROMISE, accepted(TERM, 2, end), term=NEXT)
    assert gone(play) == reasons
    # A minority that has accepted it does not end the group: the others know of nothing later.
    play = standby()
    for number in (1, 2, 3):
        comes(play, number)
    asked(play)
    play.says(3, PROMISE, accepted(TERM, 2, end), term=NEXT)
    promised(play, (1, 2), NEXT)
    assert play.members() == [1, 2, 3]


def founded(
    groups: dict[int, list[int]], waiting: bool = True, **limits: int
) -> _testing.MasterPlay:
    """The first master, where these groups begin: the numbers of their peers."""
    play = _testing.MasterPlay(0, {"masters": 3, "place": 0, **limits})
    play.passes(2.5)
    for group, numbers in groups.items():
        begin(play, group, numbers, waiting)
    return play


def begin(
    play: _testing.MasterPlay, group: int, numbers: Sequence[int], waiting: bool = True
) -> None:
    for number in numbers:
        play.connect(number, f"192.0.2.{number}")
        play.says(number, MAY_FOUND, b"", 0, term=0)
        play.says(number, JOIN, join(number, group=group, waiting=waiting), 0, term=0)
        assert play.has_group(group)


def lose(play: _testing.MasterPlay, number: int) -> set[int]:
    """The only member of its group is lost: whose connections the master closes for it."""
    play.told()
    play.disconnect(number)
    play.passes(7)  # PCCL_HEARTBEAT_TIMEOUT, and more
    return {to for to, what, *_ in play.told() if what == "close"}


def test_a_newcomer_of_a_replica_without_ranks_is_refused() -> None:
    play = founded({0: [1]})
    play.told()
    play.connect(9, "192.0.2.9")
    play.says(9, JOIN, join(9, replica="x"), 0, term=0)
    assert "a replica has a name of up to 256 bytes" in gone(play)[9]
    assert play.members() == [1]


def test_the_loss_of_one_group_moves_no_other_one() -> None:
    play = founded({0: [1], 7: [2]})
    assert lose(play, 2) == set()
    assert play.members() == [1] and not play.has_group(7)
    play.passes(2.5)
    begin(play, 9, [3])  # in the same run
    assert play.members() == [1]


def test_a_group_that_was_given_up_begins_again_with_a_higher_term() -> None:
    play = founded({0: [1], 7: [2]})
    lose(play, 2)
    play.passes(2.5)
    begin(play, 7, [3])
    play.told()
    play.connect(90, "192.0.2.90")
    play.says(90, COMMAND, bytes([KICK]) + text(peer(3).hex()))
    # Members that come back do not believe a refusal with a term that they have not followed.
    assert [(to, term) for to, what, term, _ in play.told() if what == "propose"] == [(3, 2 * TERM)]
    comes(play, 2, members=[peer(2)], group=7)
    play.passes(1.1)
    assert play.has_group(7) and 2 not in asked(play)


def test_members_of_a_group_that_was_given_up_may_go_on_with_it() -> None:
    play = founded({0: [1], 7: [2]})
    lose(play, 2)
    comes(play, 2, members=[peer(2)], group=7)
    assert asked(play) == {2: 2 * TERM}
    promised(play, [2], 2 * TERM)
    play.says(2, ACCEPT, u64(2), term=2 * TERM)
    assert play.has_group(7) and [what for _, what, *_ in play.told() if what == "epoch"]


def test_peers_that_wait_for_a_run_make_way_for_one_that_has_begun() -> None:
    play = founded({0: [9]}, waiting=False)
    play.told()
    for number in (1, 2, 3):
        comes(play, number)
    told = play.told()
    assert (9, "not_serving", 1, "") in told
    assert {to for to, what, *_ in told if what == "ask_promise"} == {1, 2, 3}


def test_a_master_that_has_just_begun_may_serve_soon() -> None:
    play = _testing.MasterPlay(0, {"masters": 3, "place": 1})
    for connection, answer in ((8, 1), (9, 0)):  # the second one asks two intervals later
        play.connect(connection, "192.0.2.9")
        play.says(connection, JOIN, join(connection), 0, term=0)
        assert (connection, "not_serving", answer, "") in play.told()
        play.passes(2.5)


def test_members_that_go_to_another_master_are_not_forgotten_at_once() -> None:
    play = standby()
    comes(play, 1)
    play.disconnect(1)
    for connection, answer in ((8, 1), (9, 0)):  # the second one asks two intervals later
        play.connect(connection, "192.0.2.9")
        play.says(connection, JOIN, join(connection), 0, term=0)
        assert (connection, "not_serving", answer, "") in play.told()
        play.passes(2.5)


def test_a_group_of_the_library_begins_where_the_run_is() -> None:
    group = _core.OWN_GROUPS + 5
    for play, begins in ((serving(), True), (standby(), False)):
        # Members of such a group may be on their way, as others of the run were.
        for connection, waited in ((9, False), (8, True)):
            play.connect(connection, "192.0.2.9")
            play.says(connection, JOIN, join(connection, group=group), 0, term=0)
            answers = [answer for to, what, answer, _ in play.told() if what == "not_serving"]
            assert play.has_group(group) is (begins and waited)
            assert answers == ([] if begins and waited else [0 if waited or not begins else 1])
            play.passes(2.5)


@pytest.mark.parametrize("first", [True, False])
def test_a_newcomer_is_told_whether_a_run_may_be_found_here(first: bool) -> None:
    play = serving() if first else standby()
    play.passes(2.5)
    play.connect(9, "192.0.2.9")
    play.says(9, JOIN, join(9, group=3), 0, term=0)
    assert (9, "not_serving", 0, "") in play.told()
    if not first:
        comes(play, 1)
        play.connect(8, "192.0.2.8")
        play.says(8, JOIN, join(8), 0, term=0)
        assert (8, "not_serving", 1, "") in play.told()
