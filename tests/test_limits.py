"""The bounds of cpp/pccl/master/limits.h that tests/test_hostile.py does not cover, and the time
that a large group takes of its master."""

from __future__ import annotations

from reports import join, listed, rejoin, text, u64

from pccl import _testing

JOIN, REJOIN, OP_REPORT = 0, 1, 5


def peer(number: int) -> bytes:
    return bytes([number]) * 16


def joins(play: _testing.MasterPlay, number: int, group: int = 0) -> None:
    """A peer joins on the connection of its number."""
    play.connect(number, "192.0.2.9")
    play.says(number, JOIN, join(number, group=group))


def operation(tag: int, signature: int, description: str) -> bytes:
    key = u64(1) + b"\1" + u64(tag, 0)
    return listed([key + u64(1) + b"\0\1" + u64(signature) + text(description)])


def refused(play: _testing.MasterPlay) -> dict[int, str]:
    return {connection: why for connection, what, _, why in play.told() if what == "refused"}


def test_a_full_group_refuses_newcomers() -> None:
    play = _testing.MasterPlay(3, {"max_peers": 4})
    for number in (4, 5):
        joins(play, number)
    assert refused(play) == {5: "group 0 is full (4 peers)"}


def test_groups_have_a_limit() -> None:
    play = _testing.MasterPlay(1, {"max_groups": 3})
    for group in (1, 2, 3):
        joins(play, 10 + group, group)
    assert refused(play) == {13: "too many groups"}
    assert play.has_group(2) and not play.has_group(3)


def test_descriptions_of_many_operations_are_cut() -> None:
    play = _testing.MasterPlay(2, {"many_open_calls": 4})
    for tag in range(6):
        play.says(1, OP_REPORT, operation(tag, 5, "x" * 300))
    for tag in (0, 5):
        play.says(2, OP_REPORT, operation(tag, 6, "y"))
    verdicts = [reason for _, what, _, reason in play.told() if what == "verdict"]
    assert {reason.count("x") for reason in verdicts} == {300, 128}


def returns(play: _testing.MasterPlay, number: int, hosts: list[str]) -> bool:
    """One of seven members returns to a master that does not know its group. False: no room."""
    others = [peer(other) for other in range(20, 27) if other != number]
    play.connect(number, "192.0.2.9")
    play.says(number, REJOIN, rejoin(peer(number), 7, others=others, hosts=hosts))
    told = play.told()
    assert told in ([], [(number, "close", 0, "")])
    return not told


def test_returning_members_have_a_limit() -> None:
    play = _testing.MasterPlay(1, {"max_recovering": 2})
    assert [returns(play, number, []) for number in (20, 21, 22)] == [True, True, False]
    play.disconnect(20)
    assert returns(play, 22, [])


def test_reports_of_returning_members_have_a_limit() -> None:
    play = _testing.MasterPlay(1, {"max_reported_bytes": 3000})
    assert returns(play, 20, [])
    assert not returns(play, 21, ["h" * 200])
    assert returns(play, 21, [])


def test_a_report_does_not_cost_the_master_many_times_as_much_in_a_large_group() -> None:
    def seconds(members: int) -> float:
        group = _testing.ManyMembers(members)
        group.start()
        return min(group.call()[0] for _ in range(10)) / members

    # Twice, in fact; 12 times when each report was compared with those of all others.
    assert seconds(256) < 6 * seconds(16)
