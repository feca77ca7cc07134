"""A member that makes a call late gets the same verdict as those that made it in time."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from programs import verdicts
from workers import Run, Worker, eventually, wait_for_line, wait_until_asleep

CALLS = [
    "allgather",
    "into",
    "broadcast",
    "reduce_scatter",
    "alltoall",
    "allreduce",
    "barrier",
    "admit",
    "sync",
]


def started(run: Run, count: int) -> tuple[list[Worker], list[str]]:
    """Members in rank order, and their ids."""
    peers = run.peers(count, verdicts.make_calls)
    told = [(peer.expect("in", 60), peer) for peer in peers]
    told.sort(key=lambda pair: pair[0]["rank"])
    return [peer for _, peer in told], [answer["peer"] for answer, _ in told]


def everyone(peers: list[Worker], call: str, step: int) -> list[dict[str, Any]]:
    for peer in peers:
        peer.tell([call, step])
    return [peer.next(60) for peer in peers]


def kill(run: Run, peer: Worker, count: int) -> None:
    """Returns when the master has put `count` peers out."""
    peer.signal(signal.SIGKILL)
    peer.ends()
    said = run.master.stderr
    eventually(lambda: said().count(" is out: ") >= count, seconds=60, said=said)


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.env(PCCL_LOG_LEVEL="info")
def test_a_late_member_fails_with_those_that_were_interrupted(
    run: Run, call: str, stays: bool
) -> None:
    (a, b, c), ids = started(run, 3)
    for peer in (a, c):
        peer.tell([call, 1])
        wait_until_asleep(peer)
    c.signal(signal.SIGINT)
    assert c.next(60)["event"] == "interrupted"
    lost = a.expect("lost", 60)
    assert lost["lost"] == ids[2]
    if not stays:
        kill(run, c, 1)
    # They go on, and the late member does not meet their next call with its last one.
    others = [a, c] if stays else [a]
    for peer in others:
        peer.tell(["allgather", 2])
        wait_until_asleep(peer)
    b.tell([call, 1])
    assert b.next(60) == lost
    b.tell(["allgather", 2])
    for peer in (b, *others):
        assert peer.expect("done", 60)["steps"] == [2]
    for answer in everyone([b, *others], "allreduce", 3):
        assert answer["steps"] == [3]


@pytest.mark.parametrize("how", ["timeout", "interrupted"])
@pytest.mark.parametrize("call", ["admit", "sync"])
def test_a_member_that_gives_up_before_its_operations_are_over_gives_up_for_all(
    run: Run, call: str, how: str
) -> None:
    (a, b), ids = started(run, 2)
    a.tell(["begin", 1])
    assert a.next(60)["event"] == "done"
    a.tell([call if how == "interrupted" else f"{call} soon", 2])
    if how == "interrupted":
        wait_until_asleep(a)
        a.signal(signal.SIGINT)
    assert a.next(60)["event"] == how
    # The other one meets neither the operation nor the call, and both meet in the next one.
    b.tell(["begin", 1])
    assert b.next(60)["event"] == "done"
    b.tell([call, 2])
    answer = b.next(60)
    if how == "interrupted":
        assert (answer["event"], answer["lost"]) == ("lost", ids[0])
    else:
        assert answer["event"] == "timeout"
    for answer in everyone([a, b], "allreduce", 3):
        assert answer["steps"] == [3]


@pytest.mark.env(PCCL_LOG_LEVEL="info")
def test_a_late_member_has_made_as_many_calls_as_the_others_when_the_root_is_lost(run: Run) -> None:
    (a, b, c, root), ids = started(run, 4)
    a.tell(["from the last", 1])
    wait_until_asleep(a)
    kill(run, c, 1)
    kill(run, root, 2)
    lost = a.expect("lost", 60)
    assert lost["lost"] == ids[3]
    a.tell(["allreduce", 2])
    wait_until_asleep(a)
    b.tell(["from the last", 1])
    assert b.next(60) == lost
    b.tell(["allreduce", 2])
    for peer in (a, b):
        assert peer.expect("done", 60)["steps"] == [2]


@pytest.mark.env(PCCL_LOG_LEVEL="info")
def test_a_late_member_knows_the_members_as_of_the_verdict(run: Run) -> None:
    (a, b, c, d), ids = started(run, 4)
    for peer in (a, c):
        peer.tell(["reduce_scatter", 1])
        wait_until_asleep(peer)
    kill(run, d, 1)
    lost = a.expect("lost", 60)
    assert c.expect("lost", 60) == lost
    assert lost["members"] == 3 and lost["lost"] == ids[3]
    a.tell(["from the last", 2])  # that is c
    wait_until_asleep(a)
    kill(run, c, 2)
    lost_again = a.expect("lost", 60)
    assert lost_again["lost"] == ids[2]
    b.tell(["reduce_scatter", 1])
    assert b.next(60) == lost
    b.tell(["from the last", 2])
    assert b.next(60) == lost_again
    for call in ("reduce_scatter", "from the last", "allgather"):
        for answer in everyone([a, b], call, 3):
            assert answer["steps"] == [3]


@pytest.mark.parametrize("call", ["allgather", "broadcast", "allreduce"])
@pytest.mark.env(PCCL_LOG_LEVEL="info")
def test_a_late_member_meets_the_call_that_runs_again(run: Run, call: str) -> None:
    (a, b, c, d), _ = started(run, 4)
    for peer in (a, c):
        peer.tell([call, 1])
        wait_until_asleep(peer)
    kill(run, d, 1)
    kill(run, c, 2)
    b.tell([call, 1])
    done = a.expect("done", 60)
    assert b.next(60) == done
    assert done["steps"] == [1] and done["members"] == 2
    for answer in everyone([a, b], "allgather", 2):
        assert answer["steps"] == [2]


@pytest.mark.env(PCCL_LOG_LEVEL="info")
def test_a_founder_that_wakes_after_a_loss_begins_where_the_others_do(run: Run) -> None:
    """It was frozen while `init` ended, and a founder was lost meanwhile."""
    a, frozen = run.peer(verdicts.found), run.peer(verdicts.found)
    for peer in (a, frozen):
        wait_for_line(peer, " more peer")  # it has joined
    frozen.signal(signal.SIGSTOP)
    c = run.peer(verdicts.found)
    first = a.expect("in")
    assert c.expect("in") == first and first["members"] == 3
    kill(run, c, 1)
    frozen.signal(signal.SIGCONT)
    assert frozen.expect("in") == first
    for peer in (a, frozen):
        peer.tell("go")
    lost = a.expect("lost")
    assert frozen.expect("lost") == lost and lost["members"] == 2
    for peer in (a, frozen):
        assert peer.expect("gathered")["parts"] == 2
