"""The messages of a run to its user: who came, who left and why, and what a peer waits for."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from programs import news
from workers import Program, Run, Worker, command, complaints, wait_for_line

import pccl
from pccl._core import OWN_GROUPS


def step(workers: list[Worker], world: int) -> None:
    for worker in workers:
        worker.tell("step")
    for worker in workers:
        assert worker.expect("step")["world"] == world


def end(workers: list[Worker]) -> None:
    for worker in workers:
        worker.tell("end")
    for worker in workers:
        worker.expect("done")
        assert worker.ends() == 0


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (signal.SIGKILL, "connection|closed"),
        (signal.SIGTERM, "connection|closed"),
        (signal.SIGSTOP, "not heard for"),
        (None, "it left"),
    ],
    ids=["killed", "terminated", "frozen", "returns early"],
)
def test_each_survivor_is_told_who_is_lost_why_and_how_many_go_on(
    run: Run, how: signal.Signals | None, why: str
) -> None:
    quick = {"PCCL_HEARTBEAT_TIMEOUT": "2", "PCCL_LINK_TIMEOUT": "1", "PCCL_DRAIN_SECONDS": "0"}
    workers = run.peers(3, news.admit_and_reduce, **quick)
    for worker in workers:
        worker.expect("ready")
    step(workers, 3)
    *rest, gone = workers
    if how is None:
        end([gone])
    else:
        gone.signal(how)
    step(rest, 2)
    for worker in rest:
        line = re.search(r"WARN: lost (.*)", worker.stderr())
        assert line is not None, worker.stderr()
        pattern = rf"rank \d \(\S+\): .*({why}).*; 2 members go on"
        assert re.fullmatch(pattern, line[1]), line[1]
    assert complaints(rest[0].stderr()).count("\n") == 1, rest[0].stderr()


def test_members_are_told_who_joins_and_the_end_of_a_run_is_silent(run: Run) -> None:
    first = run.peers(2, news.admit_and_reduce)
    for worker in first:
        worker.expect("ready")
    step(first, 2)
    late = run.peer(news.admit_and_reduce)
    late.expect("ready")
    late.tell("step")
    world = 2
    while world == 2:
        for worker in first:
            worker.tell("step")
        world = [worker.expect("step")["world"] for worker in first][0]
    assert late.expect("step")["world"] == 3
    step([*first, late], 3)
    end([*first, late])
    for worker in first:
        told = complaints(worker.stderr())
        assert re.fullmatch(
            r"pccl\[\S+\] WARN: 1 peer joined: rank 2 \(\S+-\d+\); 3 members now\n", told
        ), told


def test_a_master_in_a_terminal_tells_who_comes_and_goes() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "pccl", "master", "--listen", "127.0.0.1:0", "--insecure"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as master:
        assert master.stdout is not None and master.stderr is not None
        address = master.stdout.readline().split()[-1]
        worker = Worker(news.admit_and_reduce, PCCL_MASTER=address)
        try:
            worker.expect("ready")
            end([worker])
            assert "started with 1 peer" in master.stderr.readline()
            line = master.stderr.readline()
            assert re.search(r"peer \S+ is out: it left; 0 members go on", line), line
        finally:
            worker.destroy()
            master.terminate()


def test_a_master_in_a_terminal_tells_who_waits_for_the_start() -> None:
    command = [sys.executable, "-m", "pccl", "master", "--listen", "127.0.0.1:0", "--insecure"]
    with subprocess.Popen(
        [*command, "--min-peers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as master:
        assert master.stdout is not None and master.stderr is not None
        address = master.stdout.readline().split()[-1]
        workers = [Worker(news.admit_and_reduce, PCCL_MASTER=address)]
        try:
            line = master.stderr.readline()
            assert line.endswith("group 0: waits to start: 1 peer here, 1 more needed\n"), line
            workers.append(Worker(news.admit_and_reduce, PCCL_MASTER=address))
            for worker in workers:
                worker.expect("ready")
            assert "started with 2 peers" in master.stderr.readline()
            end(workers)
        finally:
            for worker in workers:
                worker.destroy()
            master.terminate()


def test_a_peer_that_has_started_alone_is_told_of_those_that_come_too_late(run: Run) -> None:
    alone = run.peer(news.admit_and_reduce)
    alone.expect("ready")
    late = run.peer(news.admit_and_reduce)
    late.expect("ready")
    line = wait_for_line(alone, "has started group 0 alone")
    assert "PCCL_MIN_PEERS" in line and "--min-peers" in line
    end([alone])
    after = run.peer(news.admit_and_reduce)
    after.expect("ready")


def test_a_peer_that_starts_alone_just_after_another_went_is_told(run: Run) -> None:
    first = run.peer(news.admit_and_reduce)
    first.expect("ready")
    end([first])
    second = run.peer(news.admit_and_reduce)
    second.expect("ready")
    assert "has just left" in wait_for_line(second, "has started group 0 alone")


def test_an_explicit_peer_that_connects_first_is_told_nothing(run: Run) -> None:
    workers = [run.peer(news.explicit) for _ in range(2)]
    for worker in workers:
        worker.expect("together")
        assert "alone" not in worker.stderr()


def test_the_master_can_say_how_many_peers_a_group_starts_with() -> None:
    with pccl.MasterNode("127.0.0.1:0", min_peers=2) as master:
        first, second = [
            Worker(news.admit_and_reduce, PCCL_MASTER=master.address) for _ in range(2)
        ]
        try:
            for worker in (first, second):
                worker.expect("ready")
            step([first, second], 2)
        finally:
            for worker in (first, second):
                worker.destroy()
    with pytest.raises(pccl.InvalidArgument, match="min_peers"):
        pccl.MasterNode("127.0.0.1:0", min_peers=0)


def test_a_group_that_pccl_makes_by_itself_needs_no_more_peers_than_it_says() -> None:
    with pccl.MasterNode("127.0.0.1:0", min_peers=3) as master:
        peers = [pccl.Communicator._of_own_group(OWN_GROUPS + 1, master.address) for _ in range(2)]

        def join(peer: pccl.Communicator) -> int:
            peer._join("connect", min_peers=2, attempts=1, timeout=30, enter=True)
            return peer._joined("connect").membership()[2]

        try:
            with ThreadPoolExecutor() as pool:
                assert list(pool.map(join, peers)) == [2, 2]
        finally:
            for peer in peers:
                peer.close()


def test_init_says_after_a_second_what_it_waits_for(run: Run) -> None:
    worker = run.peer(news.admit_and_reduce, PCCL_MIN_PEERS="2")
    assert wait_for_line(worker, "waiting for").endswith("WARN: waiting for 1 more peer")
    lost = Worker(news.admit_and_reduce, PCCL_MASTER="127.0.0.1:1")
    try:
        line = wait_for_line(lost, "no master at")
        assert line.endswith("no master at 127.0.0.1:1: Connection refused; trying again")
    finally:
        lost.destroy()


def test_a_second_replica_of_one_name_is_told_why_it_waits(run: Run) -> None:
    first = run.peer(news.join_as_replica)
    first.expect("in")
    second = run.peer(news.join_as_replica)
    assert 'replica named "a" already' in wait_for_line(second, "two names")


def finished(program: Program, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(program),
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=60,
    )


def test_an_unknown_setting_is_named_once_and_those_of_tests_are_not() -> None:
    known = {"PCCL_SIM_SCHEDULES": "5", "PCCL_STRESS_SEED": "1", "PCCL_STANDBY": "0"}
    told = finished(news.run_two_masters, PCCL_MINPEERS="2", **known).stderr
    assert told == (
        "pccl WARN: there is no setting PCCL_MINPEERS: it is ignored; "
        "did you mean PCCL_MIN_PEERS?\n"
    )


def test_a_level_of_the_log_that_does_not_exist_is_refused() -> None:
    done = finished(news.run_master, PCCL_LOG_LEVEL="foo")
    assert 'PCCL_LOG_LEVEL="foo" is not TRACE, DEBUG, INFO, WARN' in done.stderr


@pytest.mark.parametrize("level", ["ERR", "error", "Critical", "NONE", "warning"])
def test_names_of_pythons_levels_are_understood(level: str) -> None:
    done = finished(news.run_two_masters, PCCL_LOG_LEVEL=level, PCCL_MINPEERS="2")
    assert ("PCCL_MINPEERS" in done.stderr) == (level == "warning")


def test_a_number_is_no_address_to_listen_at() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pccl", "master", "--listen", "5"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "a number alone is not a host" in done.stderr


def test_a_peer_whose_master_does_not_answer_says_that_it_waits_for_the_master() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        code = f"import pccl; pccl.init({address!r}, timeout=2)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1
    assert f"WARN: waiting for the master at {address} to answer" in done.stderr
    assert "waiting to be let in" not in done.stderr


def test_an_address_with_a_protocol_is_refused_at_once() -> None:
    code = "import pccl; pccl.init('http://192.0.2.7:48148')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "write host:port, without a protocol such as http://" in done.stderr


def test_modules_are_there_as_attributes_and_loaded_when_they_are_used() -> None:
    assert (
        finished(news.use_modules_as_attributes).stdout
        == "module 'pccl' has no attribute 'nothing'\n"
    )


def test_diloco_for_jax_is_where_the_docs_say() -> None:
    pytest.importorskip("jax")
    done = finished(news.name_diloco_of_jax)
    assert done.stdout == "diloco\n", done.stderr


def test_a_tree_without_an_array_is_refused_and_none_beside_arrays_is_not(run: Run) -> None:
    for worker in run.peers(2, news.trees_with_none):
        worker.expect("ok")


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "the long way"])
@pytest.mark.parametrize("call", ["allreduce", "allgather", "broadcast"])
def test_none_has_to_be_in_the_same_places_on_all_members(run: Run, call: str, plain: bool) -> None:
    for worker in run.peers(2, partial(news.none_on_one, call, plain)):
        text = worker.expect("refused")["text"]
        assert "None at ['b']" in text and re.search(r"rank \d \(\S+\) called it", text), text


def test_a_meta_tensor_has_no_elements_to_reduce() -> None:
    torch = pytest.importorskip("torch")
    with pccl.MasterNode("127.0.0.1:0") as master:
        with pccl.Communicator(master.address) as comm:
            for tensor in (
                torch.empty(2, device="meta"),
                [torch.empty(2, device="meta"), np.ones(2)],
            ):
                with pytest.raises(pccl.NotSupported, match="no elements"):
                    pccl.allreduce(tensor, comm=comm)


def test_members_in_calls_that_cannot_meet_are_named_with_what_they_called(run: Run) -> None:
    for worker in run.peers(2, news.calls_that_cannot_meet):
        text = worker.expect("stuck")["text"]
        assert "RANK_CONNECTION_LOST" not in text
        assert "collective #0 (all_gather of float64[3])" in text and "barrier #0" in text
