"""Members that make a call late are told what those that made it in time were told."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from workers import Run, Worker, running, wait_until_asleep

# Makes the calls it is told. Each carries the number of the caller's step, so that a call that meets
# another step's is seen in its result.
LOOP = """
pccl.init()
pccl.barrier()
say(event="in", rank=pccl.rank(), peer=pccl.membership().peers[pccl.rank()])
for line in sys.stdin:
    call, step = json.loads(line)
    x = np.full((4 * pccl.world_size(), 2), step, np.int64)
    try:
        if call == "allgather":
            made = pccl.allgather(x)
        elif call == "into":
            made = pccl.allgather(x, out=np.zeros((pccl.world_size(), *x.shape), np.int64))
        elif call == "broadcast":
            made = pccl.broadcast(x)
        elif call == "from the last":
            made = pccl.broadcast(x, pccl.world_size() - 1)
        elif call == "reduce_scatter":
            made = pccl.reduce_scatter(x, "avg")
        elif call == "allreduce":
            made = pccl.allreduce(x, "max")
        elif call == "barrier":
            made = pccl.barrier()
        elif call == "admit":
            made = pccl.admit()
        elif call == "begin":
            made = pccl.allreduce_async(x, "max")
        elif call == "admit soon":
            made = pccl.admit(timeout=0.3)
        elif call == "sync soon":
            made = pccl.sync({"step": np.zeros(3)}, timeout=0.3)
        else:
            made = pccl.sync({"step": np.zeros(3)})["step"]
        steps = np.unique(made).tolist() if isinstance(made, np.ndarray) else []
        how = dict(event="done", steps=steps)
    except pccl.PeerLost as error:
        how = dict(event="lost", lost=error.peer)
    except pccl.Timeout:
        how = dict(event="timeout")
    except KeyboardInterrupt:
        how = dict(event="interrupted")
    say(**how, epoch=pccl.membership().epoch, members=pccl.world_size())
pccl.shutdown()
"""

CALLS = [
    "allgather",
    "into",
    "broadcast",
    "reduce_scatter",
    "allreduce",
    "barrier",
    "admit",
    "sync",
]


def started(run: Run, count: int) -> tuple[list[Worker], list[str]]:
    """Members in rank order, and their ids."""
    peers = run.peers(count, LOOP)
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
    deadline = time.monotonic() + 60
    while run.master.stderr().count(" is out: ") < count:
        assert time.monotonic() < deadline, run.master.stderr()
        time.sleep(0.01)


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_a_late_member_fails_with_those_that_were_interrupted(call: str, stays: bool) -> None:
    with running(PCCL_LOG_LEVEL="info") as run:
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
    call: str, how: str
) -> None:
    with running() as run:
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


def test_a_late_member_has_made_as_many_calls_as_the_others_when_the_root_is_lost() -> None:
    with running(PCCL_LOG_LEVEL="info") as run:
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


def test_a_late_member_knows_the_members_as_of_the_verdict() -> None:
    with running(PCCL_LOG_LEVEL="info") as run:
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
def test_a_late_member_meets_the_call_that_runs_again(call: str) -> None:
    with running(PCCL_LOG_LEVEL="info") as run:
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


FOUNDER = """
start(min_peers=3)
before = pccl.membership()
say(event="in", epoch=before.epoch, members=before.world_size)
hear()
try:
    pccl.reduce_scatter(np.ones((3, 4)))
except pccl.PeerLost as error:
    say(event="lost", peer=error.peer, members=pccl.world_size())
say(event="gathered", parts=len(pccl.allgather(np.ones(1))))
hear()
"""


def test_a_founder_that_wakes_after_a_loss_begins_where_the_others_do() -> None:
    """It was frozen while `init` ended, and a founder was lost meanwhile."""
    with running(PCCL_LOG_LEVEL="info") as run:
        a, frozen = run.peer(FOUNDER), run.peer(FOUNDER)
        deadline = time.monotonic() + 60
        while not all(" more peer" in peer.stderr() for peer in (a, frozen)):
            assert time.monotonic() < deadline, frozen.stderr()  # both have joined
            time.sleep(0.01)
        frozen.signal(signal.SIGSTOP)
        c = run.peer(FOUNDER)
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
