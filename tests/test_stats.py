"""Sums over a peer's calls, the times of one call, and members that come and go."""

from __future__ import annotations

import re
import signal
import threading
from functools import partial
from typing import Any

import pytest
from members import in_threads
from programs import stats
from workers import Run, Worker, eventually, wait_for_line, wait_until_asleep

import pccl
from pccl import _core

APART = [{"PCCL_HOST_ID": "one"}, {"PCCL_HOST_ID": "two"}]
SMALL, LARGE = 1000, 300_000


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("shm", ["1", "0"])
def test_stats_are_the_sums_of_the_calls(run: Run, shm: str, count: int) -> None:
    program = partial(stats.reduce, 3, count)
    for worker in run.peers(2, program, PCCL_SHM=shm):
        said = worker.expect("reduced")
        before, after, info = said["before"], said["after"], said["info"]
        assert (before["operations"], before["sent_bytes"], before["seconds"]) == (0, 0, 0)
        assert (after["operations"], after["aborted"]) == (3, 0)
        assert after["reruns"] <= 1  # the first one, when it turns out that they share memory
        assert after["reduced_bytes"] == 3 * 4 * count
        assert info["bytes"] == 4 * count
        assert after["sent_bytes"] >= 3 * info["tx_bytes"] > 0
        assert after["received_bytes"] >= 3 * info["rx_bytes"] > 0
        assert after["unencoded_bytes"] == after["sent_bytes"]
        assert after["compression"] == 1
        parts = [after[f"{part}_seconds"] for part in ("waiting", "moving", "deciding")]
        assert sum(parts) == pytest.approx(after["seconds"])
        assert all(part >= 0 for part in parts)
        assert after["seconds"] >= info["seconds"] > 0
        measured = info["waiting_seconds"] + info["moving_seconds"]
        assert info["seconds"] >= measured - 1e-9  # nanoseconds, as floating-point numbers
        assert (after["world_size"], after["joined"], after["lost"]) == (2, 0, 0)
        assert after["epoch"] == info["epoch"] > 0
        if shm == "0":
            assert list(after["stripes"].values())[0] >= 1


def test_stats_show_what_quantization_saves(run: Run) -> None:
    program = partial(stats.reduce, 1, LARGE, "uint8")
    workers = [run.peer(program, PCCL_MIN_PEERS="2", **host) for host in APART]
    for worker in workers:
        after = worker.expect("reduced")["after"]
        assert 3 < after["compression"] < 4.1
        assert after["unencoded_bytes"] > 3 * after["sent_bytes"]


@pytest.mark.parametrize("count", [10, SMALL * 10, LARGE])
@pytest.mark.parametrize("shm", ["1", "0"])
def test_waiting_seconds_are_those_until_the_last_member_calls(
    run: Run, shm: str, count: int
) -> None:
    first, late = run.peers(2, stats.meet, PCCL_SHM=shm)
    for worker in (first, late):
        worker.expect("ready")
    first.tell(count)
    begun = first.expect("begins")["at"]
    wait_until_asleep(first)
    late.tell(count)
    called = late.expect("begins")["at"]
    waited = called - begun
    info, other = first.expect("met"), late.expect("met")
    # From the call, which was a moment after it said so.
    assert waited - 0.05 < info["waiting_seconds"] <= info["seconds"]
    assert waited > 0.1 and other["waiting_seconds"] < waited / 2


def told_of(workers: list[Worker]) -> list[dict[str, Any]]:
    for worker in workers:
        worker.tell("step")
    return [worker.expect("step") for worker in workers]


@pytest.mark.parametrize("shm", ["1", "0"])
def test_programs_are_told_of_members_that_come_and_go(run: Run, shm: str) -> None:
    env = {"PCCL_SHM": shm, "PCCL_HEARTBEAT_TIMEOUT": "2"}
    workers = run.peers(2, stats.admit_and_reduce, **env)
    ids = [worker.expect("ready")["me"] for worker in workers]
    assert all(step["changes"] == [] for step in told_of(workers))
    late = run.peer(stats.admit_and_reduce, **env)
    late_id = late.expect("ready")["me"]
    late.tell("step")  # waits to be let in
    steps = told_of(workers)
    while steps[0]["world"] == 2:
        assert all(step["changes"] == [] for step in steps)
        steps = told_of(workers)
    for step in steps:
        (change,) = step["changes"]
        assert (change["joined"], change["lost"]) == ([late_id], [])
        assert change["inside"] == ["admit"]
        assert set(change["peers"]) == {*ids, late_id}
        assert len(set(change["names"])) == 3 and all(change["names"])
        assert (step["stats"]["joined"], step["stats"]["lost"]) == (1, 0)
    (change,) = late.expect("step")["changes"]
    assert set(change["joined"]) == {*ids, late_id}  # it knew of none before
    late.signal(signal.SIGKILL)
    for step in told_of(workers):
        (change,) = step["changes"]
        assert change["joined"] == [] and change["rank"] in (0, 1)
        (gone,) = change["lost"]
        assert gone["peer"] == late_id and gone["reason"] and gone["name"].endswith(str(late.pid))
        assert step["stats"]["lost"] == 1
        assert step["world"] == 2
    for worker in workers:
        # The first callback fails each time; the calls and the second one do not care.
        assert len(re.findall("RuntimeError: of the callback", worker.stderr())) == 2
        worker.tell("remove")
        worker.expect("removed")
    # The next change is told to nobody.
    workers[1].signal(signal.SIGKILL)
    workers[0].tell("step")
    last = workers[0].expect("step")
    assert (last["world"], last["changes"]) == (1, [])
    assert last["stats"]["lost"] == 2


def test_a_callback_may_be_there_before_the_connection(run: Run) -> None:
    assert "closed" in run.peer(stats.connect).expect("closed")["text"]


def test_a_program_that_was_put_out_and_comes_back_is_told_of_members_again(run: Run) -> None:
    stays, gone = workers = [
        run.peer(stats.come_back, PCCL_NAME=name, PCCL_MIN_PEERS="2") for name in ("stays", "gone")
    ]
    for worker in workers:
        worker.expect("ready")
    assert all(step["world"] == 2 for step in told_of(workers))
    _core.command(run.address, "kick", "gone")
    gone.tell("step")
    gone.expect("back")
    wait_for_line(gone, "waiting to be let in")
    stays.tell("step")
    steps = [worker.expect("step") for worker in (stays, gone)]
    (change,) = steps[1]["changes"]
    assert change["joined"] == change["peers"] == [step["me"] for step in steps]
    assert [step["world"] for step in told_of(workers)] == [2, 2]


def test_callbacks_end_when_the_program_leaves(run: Run) -> None:
    assert run.peer(stats.leave_and_join_again).expect("done")["told"] == 0


def test_ctrl_c_in_a_callback_ends_the_call() -> None:
    told: list[int] = []

    def stopped(change: pccl.MembershipChange) -> None:
        raise KeyboardInterrupt

    with pccl.MasterNode("127.0.0.1:0") as master:
        first, second = (pccl.Communicator(master.address) for _ in range(2))
        first.connect()
        first.on_membership_change(stopped)
        first.on_membership_change(lambda change: told.append(len(change.peers)))
        entering = threading.Thread(target=second.connect)
        entering.start()
        with pytest.raises(KeyboardInterrupt):
            while pccl.world_size(first) == 1:
                first.update_topology()
        entering.join()
        assert told == [2]  # the call was over, and the next callback did not miss the change
        assert pccl.world_size(first) == 2
        second.close()
        first.close()


def test_a_callback_that_comes_while_the_peer_connects_is_told_of_the_first_membership() -> None:
    told: list[pccl.MembershipChange] = []
    with pccl.MasterNode("127.0.0.1:0") as master:
        first, second, third = (pccl.Communicator(master.address) for _ in range(3))
        first.connect()
        entering = threading.Thread(target=second.connect)
        entering.start()
        eventually(first.are_peers_pending)
        second.on_membership_change(told.append)
        while pccl.world_size(first) == 1:
            first.update_topology()
        entering.join()
        assert [(len(change.joined), change.rank) for change in told] == [(2, 1)]
        entering = threading.Thread(target=third.connect)
        entering.start()
        eventually(lambda: any(in_threads([comm.are_peers_pending for comm in (first, second)])))
        in_threads([first.update_topology, second.update_topology])
        entering.join()
        assert [len(change.joined) for change in told] == [2, 1]
        for comm in (third, second, first):
            comm.close()


def test_a_callback_must_be_callable() -> None:
    comm = pccl.Communicator("127.0.0.1:1")
    with pytest.raises(pccl.InvalidArgument, match="callback must be callable, not 3"):
        comm.on_membership_change(3)  # type: ignore[arg-type]
    comm.close()
    with pytest.raises(pccl.InvalidUsage):
        comm.on_membership_change(print)


def test_nothing_is_known_before_init() -> None:
    for call in (pccl.stats, lambda: pccl.on_membership_change(print)):
        with pytest.raises(pccl.NotInitialized):
            call()


def test_waiting_is_no_time_of_a_peer_that_is_alone(run: Run) -> None:
    said = run.peer(partial(stats.reduce, 2, SMALL)).expect("reduced")
    assert (said["after"]["operations"], said["after"]["sent_bytes"]) == (2, 0)
    assert said["info"]["waiting_seconds"] < 0.05
