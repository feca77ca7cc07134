"""No two of these peers can connect: the master relays what goes between them."""

from __future__ import annotations

import shutil
import signal
from typing import Any

import namespaces
import nat
import pytest
from programs import nat_peers
from test_nat import SETTINGS, connections, reduce_once_more, start
from workers import Worker, eventually

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(nat.why_not() is not None, reason=str(nat.why_not())),
]

SECRET = "a secret of these tests, and of no other run"


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "with a secret"])
@pytest.mark.parametrize("peers", [2, 3])
def test_peers_each_behind_a_nat_of_its_own_reduce(peers: int, secret: str | None) -> None:
    settings = SETTINGS | ({"PCCL_SECRET": secret} if secret else {})
    with (
        nat.hosts([*range(peers), None]) as hosts,
        namespaces.running_on(hosts[-1], **settings) as run,
    ):
        workers = start(tuple(range(peers)), hosts[:-1], run)
        answers = [worker.expect("reduced", 60) for worker in workers]
        print([answer["seconds"] for answer in answers], answers[0]["schedules"])
        reduce_once_more(workers)


def all_do(word: object, workers: list[Worker], event: str) -> list[dict[str, Any]]:
    for worker in workers:
        worker.tell(word)
    answers = [worker.expect(event, 60) for worker in workers]
    assert all(answer["size"] == len(workers) for answer in answers), answers
    assert all(answer.get("right", True) for answer in answers)
    return answers


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "with a secret"])
def test_two_alone_share_their_state_and_one_that_comes_later_gets_it(secret: str | None) -> None:
    settings = SETTINGS | ({"PCCL_SECRET": secret} if secret else {})
    with (
        nat.hosts([0, 1, 2, None]) as hosts,
        namespaces.running_on(hosts[-1], **settings) as run,
    ):
        workers = [
            run.peer(nat_peers.reduce_or_sync, host, PCCL_MIN_PEERS="2") for host in hosts[:2]
        ]
        answers = all_do(10, workers, "reduced")
        assert answers[0]["relayed"] == [[0, 1]]
        states = all_do("sync", workers, "synced")
        assert states[0]["first"] == states[1]["first"]
        # It has no way to either of them.
        late = run.peer(nat_peers.reduce_or_sync, hosts[2])
        late.tell("sync")
        size = 2
        while size < 3:
            for worker in workers:
                worker.tell("sync")
            sizes = [worker.expect("synced", 60)["size"] for worker in workers]
            assert sizes[0] == sizes[1]
            size = sizes[0]
        assert late.expect("synced", 60)["first"] == states[0]["first"]
        assert all_do(500_000, [*workers, late], "reduced")[0]["relayed"] == [
            [0, 1],
            [0, 2],
            [1, 2],
        ]
        for worker in workers:
            assert "goes through the master" in worker.stderr()
        assert "cannot connect" in run.workers[0].stderr()


def test_the_others_go_on_when_one_is_killed() -> None:
    with (
        nat.hosts([0, 1, 2, None]) as hosts,
        namespaces.running_on(hosts[-1], **SETTINGS) as run,
    ):
        workers = [
            run.peer(nat_peers.reduce_or_sync, host, PCCL_MIN_PEERS="3") for host in hosts[:3]
        ]
        all_do(10, workers, "reduced")
        for worker in workers[:2]:
            worker.tell(3_000_000)
        workers[2].process.kill()  # the others wait for it, in the operation
        for worker in workers[:2]:
            answer = worker.expect("reduced", 60)
            assert answer["right"] and answer["size"] == 2 and answer["relayed"] == [[0, 1]]
        all_do(500_000, workers[:2], "reduced")


def connected(host: namespaces.Host, address: str) -> int:
    """Connections of that host to the other address."""
    return sum(end.startswith(f"{address}:") for _, end in connections(host))


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss")
def test_a_frozen_one_is_put_out_and_the_others_go_on() -> None:
    with (
        nat.hosts([0, 1, 2, None]) as hosts,
        namespaces.running_on(hosts[-1], **SETTINGS) as run,
    ):
        workers = [
            run.peer(nat_peers.reduce_or_sync, host, PCCL_MIN_PEERS="3") for host in hosts[:3]
        ]
        all_do(10, workers, "reduced")
        frozen = nat.address_of_nat(1)
        assert connected(hosts[-1], frozen) >= 2  # to the master, and through it
        workers[1].signal(signal.SIGSTOP)
        for worker in (workers[0], workers[2]):
            worker.tell(3_000_000)
        for worker in (workers[0], workers[2]):
            answer = worker.expect("reduced", 60)
            assert answer["right"] and answer["size"] == 2
        # No connection is left to the kernel of the frozen one.
        eventually(lambda: connected(hosts[-1], frozen) == 0, said=lambda: connections(hosts[-1]))
        all_do(500_000, [workers[0], workers[2]], "reduced")


def test_a_run_survives_its_master_with_all_links_going_through_it() -> None:
    with (
        nat.hosts([0, 1, None]) as hosts,
        namespaces.running_on(hosts[-1], **SETTINGS) as run,
    ):
        workers = [
            run.peer(nat_peers.reduce_or_sync, host, PCCL_MIN_PEERS="2") for host in hosts[:2]
        ]
        all_do(10, workers, "reduced")
        run.restart_master(hosts[-1])
        answers = all_do(500_000, workers, "reduced")
        assert answers[0]["relayed"] == [[0, 1]]
