"""Operators of a run: the status, names, and the commands kick, drain and pause."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from programs import operators
from reports import (
    ASK_STATUS,
    BARRIER,
    BLOCKED,
    COMMAND,
    ENTER_ROUND,
    HEARTBEAT,
    JOIN,
    PREPARED,
    gone,
    heartbeat,
    join,
    listed,
    peer,
    text,
    u64,
)
from workers import Run, eventually, running

import pccl
from pccl import _core, _testing

SECRET = "a secret of a test, which has enough characters"
KICK, DRAIN, PAUSE, RESUME = range(4)
ADMIT = 0
EVICTED = 15


def enter(kind: int, admission: int, number: int) -> bytes:
    return bytes([kind]) + u64(admission, number) + b"\x00"


def order(
    play: _testing.MasterPlay, kind: int, name: str = "", connection: int = 90
) -> tuple[int, str]:
    """Gives a command on a connection of its own. Whether it was carried out, and the text."""
    play.told()
    play.connect(connection, "192.0.2.90")
    play.says(connection, COMMAND, bytes([kind]) + text(name))
    told = play.told()
    play.disconnect(connection)
    ((done, said),) = [(code, said) for to, what, code, said in told if what == "result"]
    for to, what, code, said_to_others in told:
        if what not in ("result", "close"):
            _heard.append((to, what, code, said_to_others))
    return done, said


_heard: list[tuple[int, str, int, str]] = []


@pytest.fixture(autouse=True)
def _nothing_heard() -> None:
    _heard.clear()


# The status.


def test_a_status_shows_who_is_in_a_call_and_who_is_missing() -> None:
    play = _testing.MasterPlay(3, names=["ada", "bob", "cid"])
    play.says(1, ENTER_ROUND, enter(BARRIER, 1, 0))
    play.says(3, ENTER_ROUND, enter(BARRIER, 1, 0))
    play.passes(2)
    status = play.status()
    assert [member["name"] for member in status["members"]] == ["ada", "bob", "cid"]
    assert status["calls"] == [("barrier #0", 2.0, [0, 2], [1])]
    assert {member["seconds"] for member in status["members"]} == {2.0}
    play.says(2, ENTER_ROUND, enter(BARRIER, 1, 0))
    assert play.status()["calls"] == []


def test_a_status_shows_since_when_a_member_waits_as_it_reports() -> None:
    play = _testing.MasterPlay(2)
    waits = listed([b"\x01" + bytes([BARRIER]) + u64(1, 0)]) + bytes(3)
    play.says(1, BLOCKED, waits)
    assert play.status()["members"][0]["waits"] == [("barrier #0", 1.0)]
    play.passes(2)
    play.says(1, BLOCKED, waits)
    assert play.status()["members"][0]["waits"] == [("barrier #0", 3.0)]
    play.says(1, BLOCKED, listed([]) + bytes(3))
    assert play.status()["members"][0]["waits"] == []


def test_two_peers_of_one_name_are_told_apart_by_their_ids() -> None:
    play = _testing.MasterPlay(3, names=["ada", "bob", "bob"])
    names = [member["name"] for member in play.status()["members"]]
    assert names == ["ada", f"bob/{peer(2).hex()[:8]}", f"bob/{peer(3).hex()[:8]}"]


def test_a_name_that_is_none_is_refused() -> None:
    for name in ("with blank", "x" * 65, "new\nline"):
        play = _testing.MasterPlay(1)
        play.connect(9, "192.0.2.9")
        play.says(9, JOIN, join(9, name=name))
        assert "name of a peer" in gone(play)[9]


def test_rates_are_those_between_heartbeats_a_second_apart() -> None:
    play = _testing.MasterPlay(2)
    play.says(1, HEARTBEAT, heartbeat(100))
    play.passes(0.5, silent=[1])
    play.says(1, HEARTBEAT, heartbeat(200))
    member = play.status()["members"][0]
    assert (member["operations"], member["within"]) == (200, 0)  # half a second tells nothing
    play.passes(0.5, silent=[1])
    play.says(1, HEARTBEAT, heartbeat(300))
    member = play.status()["members"][0]
    assert (member["operations"], member["added"], member["within"]) == (300, 200, 1.0)
    play.passes(2, silent=[1])
    play.says(1, HEARTBEAT, heartbeat(301))
    member = play.status()["members"][0]
    assert (member["added"], member["within"]) == (1, 2.0)
    assert play.status()["operations"] == 301


def test_a_departure_is_an_event_and_counted() -> None:
    play = _testing.MasterPlay(2, names=["ada", "bob"])
    play.says(2, ENTER_ROUND, bytes([4]) + u64(1, 0) + b"\x00")  # the wrong payload
    status = play.status()
    assert status["evictions"] == 1
    line, warning, group = status["events"][-1]
    assert "peer bob is out: protocol misuse" in line and warning and group == 0


def test_the_last_256_lines_are_kept() -> None:
    play = _testing.MasterPlay(1)
    for _ in range(150):
        order(play, PAUSE)
        order(play, RESUME)
        play.passes(1)
    events = play.status()["events"]
    assert len(events) == 256
    assert events[-1][0] == "the operator resumes admission"


def test_questions_without_end_are_refused_and_nobody_else_is() -> None:
    play = _testing.MasterPlay(2)
    play.told()
    for asker in range(100, 140):
        play.connect(asker, "192.0.2.9")
        play.says(asker, ASK_STATUS, b"")
    told = play.told()
    answered = [to for to, what, last, _ in told if what == "status" and last]
    refused = [to for to, what, _, why in told if what == "refused" and "ask again later" in why]
    assert answered == list(range(100, 132)) and refused == list(range(132, 140))
    assert play.members() == [1, 2]
    play.passes(1)
    play.connect(200, "192.0.2.9")
    play.says(200, ASK_STATUS, b"")
    assert (200, "status", 1, "") in play.told()


def test_a_connection_asks_eight_times_at_most() -> None:
    play = _testing.MasterPlay(1)
    play.told()
    play.connect(9, "192.0.2.9")
    for _ in range(9):
        play.says(9, ASK_STATUS, b"")
    assert [what for to, what, *_ in play.told() if to == 9] == ["status"] * 8 + [
        "refused",
        "close",
    ]


@pytest.mark.parametrize("kind", [ASK_STATUS, COMMAND])
def test_a_member_neither_asks_nor_commands_as_one(kind: int) -> None:
    play = _testing.MasterPlay(2)
    play.says(2, kind, b"" if kind == ASK_STATUS else bytes([KICK]) + text("x"))
    assert "do not send" in gone(play)[2]


# Commands.


@pytest.mark.parametrize("name", ["bob", peer(2).hex(), peer(2).hex()[:8]])
def test_a_peer_is_kicked_by_its_name_or_id(name: str) -> None:
    play = _testing.MasterPlay(3, names=["ada", "bob", "cid"])
    done, said = order(play, KICK, name)
    assert done and said == "kicked rank 1 (bob) of group 0"
    assert play.members() == [1, 3]
    assert (2, "refused", EVICTED, "kicked by the operator") in _heard
    assert ("the operator kicks rank 1 (bob)", True, 0) in play.status()["events"]


def test_a_newcomer_is_kicked_as_well() -> None:
    play = _testing.MasterPlay(2)
    play.connect(9, "192.0.2.9")
    play.says(9, JOIN, join(9, name="late"))
    assert order(play, KICK, "late") == (1, "kicked peer late of group 0")
    assert play.status()["newcomers"] == []
    assert (9, "refused", EVICTED, "kicked by the operator") in _heard


def test_a_member_without_a_connection_is_kicked_and_no_other_one() -> None:
    play = _testing.MasterPlay(3, names=["ada", "bob", "cid"])
    for connection in (2, 3):
        play.disconnect(connection)
    assert order(play, KICK, "cid")[0]
    assert play.members() == [1, 2]


def test_a_name_that_nobody_or_that_several_have_changes_nothing() -> None:
    play = _testing.MasterPlay(3, names=["ada", "bob", "bob"])
    done, said = order(play, KICK, "eve")
    assert not done and 'has the name or id "eve"' in said
    done, said = order(play, KICK, "bob")
    assert not done and "2 peers have the name" in said
    assert all(peer(number).hex()[:8] in said for number in (2, 3))
    assert play.members() == [1, 2, 3]
    assert order(play, KICK, f"bob/{peer(3).hex()[:8]}")[0]
    assert play.members() == [1, 2]


def test_a_peer_is_asked_to_leave_and_its_heartbeat_confirms_it() -> None:
    play = _testing.MasterPlay(2, names=["ada", "bob"])
    done, said = order(play, DRAIN, "bob")
    assert done and "rank 1 (bob)" in said
    assert [to for to, what, *_ in _heard if what == "drain"] == [2]
    assert not play.status()["members"][1]["draining"]
    play.says(2, HEARTBEAT, heartbeat(draining=True))
    assert [member["draining"] for member in play.status()["members"]] == [False, True]
    play.disconnect(2)
    done, said = order(play, DRAIN, "bob")
    assert not done and "not connected" in said


def test_newcomers_wait_while_admission_is_paused() -> None:
    play = _testing.MasterPlay(1)
    assert order(play, PAUSE)[0] and play.status()["paused"]
    play.connect(9, "192.0.2.9")
    play.says(9, JOIN, join(9))
    play.says(9, PREPARED, u64(1) + listed([]))
    told = play.told()
    assert [to for to, what, _, said in told if "paused admission" in said] == [9]
    play.says(1, ENTER_ROUND, enter(ADMIT, 1, 0))
    assert play.members() == [1]
    assert [what for to, what, *_ in play.told() if to == 1] == ["outcome"]
    assert play.status()["newcomers"][0][1] == 3  # ready: only the pause keeps it out
    assert order(play, RESUME)[0] and not play.status()["paused"]
    play.says(1, ENTER_ROUND, enter(ADMIT, 1, 1))
    assert play.members() == [1, 9]


def test_a_pause_tells_those_who_wait_already() -> None:
    play = _testing.MasterPlay(1)
    play.connect(9, "192.0.2.9")
    play.says(9, JOIN, join(9))
    order(play, PAUSE)
    assert [to for to, what, _, said in _heard if "paused admission" in said] == [9]
    _heard.clear()
    assert order(play, PAUSE) == (1, "admission is paused already")
    assert not _heard
    assert order(play, RESUME)[1] == "newcomers are admitted again"
    assert order(play, RESUME) == (1, "admission was not paused")


def test_a_group_starts_while_admission_is_paused() -> None:
    play = _testing.MasterPlay(0)
    order(play, PAUSE)
    play.connect(9, "192.0.2.9")
    play.says(9, JOIN, join(9))
    assert play.members() == [9]


def test_commands_without_end_are_refused() -> None:
    play = _testing.MasterPlay(1)
    play.told()
    for asker in range(100, 140):
        play.connect(asker, "192.0.2.9")
        play.says(asker, COMMAND, bytes([KICK]) + text("nobody"))
    whats = [what for _, what, *_ in play.told() if what in ("result", "refused")]
    assert whats == ["result"] * 32 + ["refused"] * 8


def test_newcomers_of_a_group_that_has_started_want_no_number_of_peers() -> None:
    with (
        pccl.MasterNode("127.0.0.1:0") as master,
        ThreadPoolExecutor(1) as pool,
        ExitStack() as stack,
    ):
        one, late = (pccl.Communicator(master.address) for _ in range(2))
        for comm in (one, late):
            stack.callback(comm.close)
        one.connect()
        join = {"min_peers": 5, "attempts": 3, "timeout": 20.0, "enter": True}
        joined = pool.submit(late._join, "init", **join)

        def group() -> Any:
            return master.status()["groups"][0]

        eventually(lambda: [one["state"] for one in group()["newcomers"]] == ["ready"])
        assert group()["min_peers"] == 1
        assert pccl.admit(comm=one, timeout=20)  # it has come in itself
        eventually(lambda: pccl.admit(comm=one, timeout=20))
        joined.result(20)
        assert len(group()["members"]) == 2 and group()["min_peers"] == 1


# Real processes.


def pair(run: Run, *names: str) -> list[Any]:
    workers = [
        run.peer(operators.obey, PCCL_MIN_PEERS=str(len(names)), PCCL_NAME=name) for name in names
    ]
    for worker in workers:
        worker.expect("in")
    return workers


@pytest.mark.parametrize("shm", ["0", "1"])
def test_the_status_of_a_run_names_who_is_waited_for(run: Run, shm: str) -> None:
    run.env["PCCL_SHM"] = shm
    ada, bob = pair(run, "ada", "bob")
    ada.tell("reduce")

    def waited_for() -> Any:
        (group,) = _core.ask_status(run.address)["groups"]
        names = [member["name"] for member in group["members"]]
        return [
            (names[call["missing"][0]], call["what"], names[call["entered"][0]])
            for call in group["calls"]
        ]

    assert eventually(waited_for) == [("bob", "allreduce of float32[5], sum", "ada")]

    def waits() -> Any:
        (group,) = _core.ask_status(run.address)["groups"]
        return {member["name"]: member["waits"] for member in group["members"]}["ada"]

    (wait,) = eventually(waits)
    assert wait["call"] == "collective #0" and wait["seconds"] >= 1
    bob.tell("reduce")
    for worker in (ada, bob):
        worker.expect("reduced")

    def counted() -> Any:
        (group,) = _core.ask_status(run.address)["groups"]
        return {member["operations"] for member in group["members"]} == {1} and group

    group = eventually(counted)
    assert {member["reduced_bytes"] for member in group["members"]} == {20}
    assert group["operations"] == 1 and not group["calls"]


def test_the_status_of_a_master_is_the_one_that_is_asked_for() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        with pccl.Communicator(master.address, name="ada"):
            asked, own = _core.ask_status(master.address), master.status()
            for status in (asked, own):
                assert status["software"] == f"pccl {pccl.__version__}"
                (group,) = status["groups"]
                (member,) = group["members"]
                assert member["name"] == "ada" and member["software"] == status["software"]
                assert (group["epoch"], group["cause"], group["missing"]) == (1, "admission", 0)
                assert "started with 1 peer" in [event["text"] for event in status["events"]]
            assert asked.keys() == own.keys() and asked["run"] == own["run"]
    with pytest.raises(pccl.InvalidUsage):
        master.status()


def test_only_those_with_the_secret_see_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as master:
        for ask in (
            partial(_core.ask_status, master.address),
            partial(_core.command, master.address, "pause-admission"),
        ):
            with pytest.raises(pccl.AuthenticationFailed):
                ask()
        assert not master.status()["admission_paused"]
        monkeypatch.setenv("PCCL_SECRET", SECRET)
        assert _core.ask_status(master.address)["encrypted"]
        assert "wait" in _core.command(master.address, "pause-admission")
        assert master.status()["admission_paused"]


def test_a_master_that_is_not_there_says_why() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        address = master.address
    with pytest.raises(pccl.Unreachable, match="refused"):
        _core.ask_status(address)


def test_a_kicked_peer_is_told_so_and_the_other_goes_on(run: Run) -> None:
    ada, bob = pair(run, "ada", "bob")
    bob.tell("reduce")
    assert _core.command(run.address, "kick", "bob") == "kicked rank " + (
        f"{operators_rank(run, 'bob')} (bob) of group 0"
    )
    told = bob.expect("failed")
    assert told["kind"] == "Evicted" and "kicked by the operator" in told["text"]
    ada.tell("reduce")
    assert ada.expect("reduced")["world"] == 1
    assert "(bob): kicked by the operator" in ada.stderr()


def operators_rank(run: Run, name: str) -> int:
    """The rank that the events of the run say a kicked peer had."""
    for event in _core.ask_status(run.address)["events"]:
        words = event["text"].split()
        if words[:4] == ["the", "operator", "kicks", "rank"] and words[5] == f"({name})":
            return int(words[4])
    raise AssertionError("nobody was kicked")


def test_a_peer_that_is_to_leave_knows_it(run: Run) -> None:
    ada, bob = pair(run, "ada", "bob")
    for worker in (ada, bob):
        worker.tell("draining")
        assert worker.expect("draining")["draining"] is False
    assert "asked rank" in _core.command(run.address, "drain", "ada")
    ada.tell("until draining")
    assert ada.expect("draining")["draining"] is True
    bob.tell("draining")
    assert bob.expect("draining")["draining"] is False

    def draining() -> Any:
        (group,) = _core.ask_status(run.address)["groups"]
        return [member["name"] for member in group["members"] if member["draining"]]

    assert eventually(draining) == ["ada"]
    assert "leave at its next admission point" in ada.stderr()


def test_names_are_in_errors_and_lines(run: Run) -> None:
    ada, bob = pair(run, "ada", "bob")
    ada.tell("reduce")
    bob.tell("reduce more")
    for worker in (ada, bob):
        said = worker.expect("failed")["text"]
        assert "(ada) " in said and "(bob) " in said
    bob.tell("leave")
    bob.expect("left")
    ada.tell("reduce")
    ada.expect("reduced")
    assert "pccl[ada] WARN: lost rank" in ada.stderr() and "(bob): it left" in ada.stderr()


@pytest.mark.parametrize("name", ["", "two words", "x" * 65, "é", 7])
def test_a_name_that_no_peer_may_have_is_an_invalid_argument(name: Any) -> None:
    with pytest.raises(pccl.InvalidArgument, match="name"):
        pccl.Communicator("127.0.0.1:1", name=name)


def test_an_unknown_command_is_refused_here() -> None:
    with pytest.raises(pccl.InvalidArgument, match="shutdown"):
        _core.command("127.0.0.1:1", "shutdown")


def test_an_order_about_nobody_is_an_invalid_argument() -> None:
    with running() as run:
        with pytest.raises(pccl.InvalidArgument, match="no peer of this run"):
            _core.command(run.address, "kick", "eve")
