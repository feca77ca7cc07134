"""The ranks of a replica are let in and put out together: one master, two groups."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from programs import replicas
from workers import Run, Worker, eventually, wait_until_asleep

import pccl
from pccl import _core

FAST = {
    "PCCL_HEARTBEAT_INTERVAL": "0.4",
    "PCCL_HEARTBEAT_TIMEOUT": "3",
    "PCCL_LINK_TIMEOUT": "1.6",
    "PCCL_RECONNECT_TIMEOUT": "6",
}


def rank(run: Run, name: str, rank: int, *, ranks: int = 2, min_peers: int = 1) -> Worker:
    return run.peer(partial(replicas.run_rank, name, rank, ranks), PCCL_MIN_PEERS=str(min_peers))


def replica(run: Run, name: str, **options: Any) -> list[Worker]:
    return [rank(run, name, at, **options) for at in range(options.get("ranks", 2))]


def sees(worker: Worker, *names: str, timeout: float = 30.0) -> dict[str, Any]:
    """The next change of the group's replicas: to these."""
    answer = worker.expect("replicas", timeout)
    assert sorted(answer["names"]) == sorted(names), answer
    return answer


def in_both(workers: list[Worker], *names: str) -> None:
    answers = [sees(worker, *names) for worker in workers]
    # In the same order in every group, so the ranks in it are those of replicas.
    assert len({(tuple(answer["names"]), answer["rank"]) for answer in answers}) == 1, answers


def hundred_points(worker: Worker) -> None:
    """Returns when it has come to so many more admission points, at which nobody came in."""
    worker.tell("count")
    worker.expect("counted")


def finish(told: list[Worker], others: list[Worker]) -> list[dict[str, Any]]:
    """Ends the loops of all groups.

    A rank that left while another one goes on would take that one along.
    """
    for worker in told:
        worker.tell("stop")
    answers = [worker.expect("done") for worker in (*told, *others)]
    for worker in (*told, *others):
        worker.tell("leave")
    for worker in (*told, *others):
        assert worker.ends() == 0
    return answers


@pytest.mark.env(**{**FAST, "PCCL_HEARTBEAT_TIMEOUT": "60"})
def test_a_killed_rank_takes_its_replica_along_and_the_others_go_on(run: Run) -> None:
    # Found by its broken connections: by its silence it would be in a minute.
    a, b, c = (replica(run, name, min_peers=3) for name in "abc")
    for worker in [*a, *b, *c]:
        worker.expect("joined")
    for workers in (a, b, c):
        in_both(workers, "a", "b", "c")
    b[1].signal(signal.SIGKILL)
    evicted = b[0].expect("evicted", 20)
    assert evicted["advice"] == "rejoin"
    assert evicted["reason"].startswith("a rank of its replica was lost: rank 1: ")
    for workers in (a, c):
        in_both(workers, "a", "c")
    finish(a, c)


@pytest.mark.env(**FAST)
def test_an_evicted_replica_comes_back_under_its_name(run: Run) -> None:
    a, b = (replica(run, name, min_peers=2) for name in "ab")
    for worker in (*a, *b):
        worker.expect("joined")
        sees(worker, "a", "b")
    b[1].signal(signal.SIGKILL)
    b[0].expect("evicted", 10)
    for worker in a:
        sees(worker, "a")
    # Only one of its ranks is there again: it must not come in.
    b[0].tell("again")
    b[0].expect("joined")
    hundred_points(a[0])
    b[1] = rank(run, "b", 1)
    b[1].expect("joined")
    for workers in (a, b):
        in_both(workers, "a", "b")
    assert [answer["lives"] for answer in finish(a, b)] == [1, 1, 2, 1]


@pytest.mark.env(**FAST)
def test_an_incomplete_replica_waits_and_comes_in_with_its_last_rank(run: Run) -> None:
    a = replica(run, "a", ranks=3)
    for worker in a:
        worker.expect("joined")
    in_both(a, "a")
    b = [rank(run, "b", 0, ranks=3), rank(run, "b", 2, ranks=3)]
    for worker in b:
        worker.expect("joined")
    hundred_points(a[0])
    b.append(rank(run, "b", 1, ranks=3))
    b[2].expect("joined")
    for workers in (a, b):
        in_both(workers, "a", "b")  # and nothing between
    finish(a, b)


@pytest.mark.env(**FAST)
def test_replicas_that_join_at_once_are_in_the_same_order_in_every_group(run: Run) -> None:
    a = replica(run, "a")
    for worker in a:
        worker.expect("joined")
    in_both(a, "a")
    newcomers = {name: replica(run, name) for name in "bcd"}
    seen: list[list[tuple[str, ...]]] = []
    for workers in (a, *newcomers.values()):
        histories = []
        for worker in workers:
            if workers is not a:
                worker.expect("joined")
            history: list[tuple[str, ...]] = []
            while len(history[-1] if history else ()) < 4:
                history.append(tuple(worker.expect("replicas")["names"]))
            histories.append(history)
        assert histories[0] == histories[1]  # the same steps in both groups
        seen.append(histories[0])
    assert all(history[-1] == seen[0][-1] for history in seen)
    finish(a, [worker for workers in newcomers.values() for worker in workers])


@pytest.mark.env(**FAST)
def test_the_group_starts_with_whole_replicas_only(run: Run) -> None:
    a = replica(run, "a", min_peers=2)
    b = [rank(run, "b", 1, min_peers=2)]
    c = [rank(run, "c", 0, min_peers=2)]
    for worker in (*a, *b, *c):
        wait_until_asleep(worker)
    b.append(rank(run, "b", 0, min_peers=2))
    for worker in (*a, *b):
        worker.expect("joined")
    for worker in (*a, *b):
        sees(worker, "a", "b")
    c[0].expect("joined")  # as one that waits to be let in
    c.append(rank(run, "c", 1))
    c[1].expect("joined")
    for worker in (*a, *b, *c):
        sees(worker, "a", "b", "c")
    finish(a, [*b, *c])


@pytest.mark.env(**FAST)
def test_a_rank_may_end_before_the_others_of_its_replica(run: Run) -> None:
    a, b = (replica(run, name, min_peers=2) for name in "ab")
    for worker in (*a, *b):
        worker.expect("joined")
        sees(worker, "a", "b")
    for worker in a:
        worker.tell("stop")
    for worker in (*a, *b):
        worker.expect("done")
    for worker in (a[0], b[0]):
        worker.tell("leave")
    assert a[0].ends() == b[0].ends() == 0
    for worker in (a[1], b[1]):
        worker.tell("reduce")
    for worker in (a[1], b[1]):
        assert worker.expect("after")["size"] == 2
        assert worker.ends() == 0


@pytest.mark.env(**FAST)
def test_a_rank_that_ends_by_an_exception_takes_its_replica_along_at_once(run: Run) -> None:
    peers = {
        (name, at): run.peer(partial(replicas.raise_in_one, name, at), PCCL_MIN_PEERS="2")
        for name in "ab"
        for at in (0, 1)
    }
    for worker in peers.values():
        worker.expect("joined")
    for worker in peers.values():
        worker.tell("go")
    evicted = peers["b", 1].expect("evicted")
    assert evicted["reason"].endswith("rank 0: its program ended with ValueError")
    for at in (0, 1):
        peers["a", at].expect("alone")


@pytest.mark.env(**{**FAST, "PCCL_RECONNECT_TIMEOUT": "20"})
def test_a_master_without_memory_keeps_replicas_together(run: Run) -> None:
    a, b, c = (replica(run, name, min_peers=3) for name in "abc")
    for worker in (*a, *b, *c):
        worker.expect("joined")
        sees(worker, "a", "b", "c")
    run.master.signal(signal.SIGKILL)
    run.master.ends()
    run.restart_master()
    c[0].signal(signal.SIGKILL)
    assert c[1].expect("evicted", 40)["reason"].startswith("a rank of its replica was lost")
    for workers in (a, b):
        in_both(workers, "a", "b")
    d = replica(run, "d")
    for worker in d:
        worker.expect("joined")
    for workers in (a, b, d):
        in_both(workers, "a", "b", "d")
    finish(a, [*b, *d])


@pytest.mark.env(**FAST)
def test_peers_that_are_no_ranks_of_this_runs_replicas_are_refused(run: Run) -> None:
    for worker in replica(run, "a"):
        worker.expect("joined")
    for options, sentence in [
        ({}, "are ranks of replicas, and this one names none"),
        ({"replica_id": "b", "ranks_per_replica": 3}, "have 2 ranks, and not 3"),
    ]:
        with pytest.raises(pccl.Refused, match=sentence):
            pccl.init(run.address, timeout=20, **options)  # type: ignore[arg-type]
    # Other groups have nothing to do with it.
    comm = pccl.init(run.address, timeout=20, peer_group=2)
    assert pccl.membership(comm).replicas == ()
    pccl.shutdown()
    with pytest.raises(pccl.InvalidArgument, match="ranks_per_replica"):
        pccl.init(run.address, replica_id="b")


def test_a_pause_of_admission_does_not_part_a_replica_that_comes_in() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:

        def make(name: str) -> list[pccl.Communicator]:
            options: dict[str, Any] = {"replica_id": name, "ranks_per_replica": 2}
            return [pccl.Communicator(master.address, group, **options) for group in (0, 1)]

        def all_ready() -> bool:
            groups = master.status()["groups"]
            return [[one["state"] for one in group["newcomers"]] for group in groups] == [
                ["ready"],
                ["ready"],
            ]

        a, b = make("a"), make("b")
        with ThreadPoolExecutor(4) as pool, ExitStack() as stack:
            for comm in a + b:
                stack.callback(comm.close)
            for _ in pool.map(pccl.Communicator.connect, a):
                pass
            for comm in a:
                assert pccl.admit(comm=comm, timeout=20)  # it has come in itself
            joins = [pool.submit(comm.connect) for comm in b]
            eventually(all_ready)
            points = 1
            while not pccl.admit(comm=a[0], timeout=20):  # until it has heard of the newcomer
                points += 1
            _core.command(master.address, "pause-admission", "")
            # The other group has not come to that point yet.
            let_in = [pccl.admit(comm=a[1], timeout=20) for _ in range(points)]
            assert let_in == [False] * (points - 1) + [True]
            for join in joins:
                join.result(20)
