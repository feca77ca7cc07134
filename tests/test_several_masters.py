"""Real processes of runs with several masters: masters that are killed, frozen and cut off."""

from __future__ import annotations

import signal
import socket
import time
from functools import partial

import pytest
from liars import Liar
from namespaces import Host, Lab, at, ip
from namespaces import worker as worker_on
from pretended import Pretended
from programs import master, several_masters
from workers import (
    FAST,
    Program,
    Worker,
    eventually,
    free_ports,
    masters,
    wait_for_line,
    wait_until_asleep,
    wait_until_stopped,
)

from pccl import _core
from pccl.master import make_secret

COUNT = 1000
TIMEOUT = float(FAST["PCCL_HEARTBEAT_TIMEOUT"])
SLACK = 3.0  # of a machine that is busy with other tests


def reach(peers: list[Worker], step: int) -> None:
    """Waits until each peer is at that step or later."""
    for peer in peers:
        while peer.expect("at", 60)["step"] < step:
            pass


def finish(peers: list[Worker], size: int) -> float:
    """All have done all steps, each step with all members and the same bytes. The longest gap."""
    answers = []
    for peer in peers:
        while (answer := peer.next(90))["event"] == "at":
            pass
        assert answer["event"] == "done", peer.stderr()
        answers.append(answer)
    assert [answer["sizes"] for answer in answers] == [[size]] * len(peers)
    assert len({answer["digest"] for answer in answers}) == 1
    return max(float(answer["gap"]) for answer in answers)


@pytest.mark.parametrize("shm", ["1", "0"], ids=["shm", "tcp"])
def test_a_run_goes_on_when_its_master_is_killed(shm: str) -> None:
    with masters(PCCL_SHM=shm) as run:
        peers = run.peers(4, partial(several_masters.reduce_in_steps, COUNT))
        for peer in peers:
            assert peer.expect("in")["size"] == 4
        for peer in peers:
            peer.tell(1500)
        reach(peers, 300)
        run.kill(0)
        wait_for_line(run.masters[1], "taken over")
        assert finish(peers, 4) < SLACK
        for peer in peers:
            peer.tell(0)
        assert [peer.ends() for peer in peers] == [0] * 4


def test_a_master_that_wakes_finds_that_another_one_serves() -> None:
    with masters(PCCL_SHM="0") as run:
        peers = run.peers(3, partial(several_masters.reduce_in_steps, COUNT))
        for peer in peers:
            peer.expect("in")
            peer.tell(1000)
        reach(peers, 200)
        run.masters[0].signal(signal.SIGSTOP)
        wait_for_line(run.masters[1], "taken over")
        assert finish(peers, 3) < TIMEOUT + SLACK
        run.masters[0].signal(signal.SIGCONT)
        for peer in peers:
            peer.tell(1000)
        wait_for_line(run.masters[0], "steps down")
        finish(peers, 3)
        # It is a standby now, and takes over again.
        run.kill(1)
        run.kill(2)
        for peer in peers:
            peer.tell(500)
        wait_for_line(run.masters[0], "taken over")
        finish(peers, 3)


@pytest.mark.shared_memory
def test_calls_in_memory_need_no_master() -> None:
    with masters(PCCL_SHM="1") as run:
        peers = run.peers(3, partial(several_masters.reduce_in_steps, COUNT))
        for peer in peers:
            peer.expect("in")
            peer.tell(1)
        finish(peers, 3)
        for one in run.masters:
            one.signal(signal.SIGSTOP)
        for peer in peers:
            peer.tell(30)
        finish(peers, 3)  # while no master can answer, and before members give them up
        for one in run.masters[1:]:
            one.signal(signal.SIGCONT)
        for peer in peers:
            peer.tell(1500)
        # The first to answer; one that was frozen for long may have been passed over.
        eventually(lambda: any("taken over" in one.stderr() for one in run.masters[1:]))
        assert finish(peers, 3) < SLACK
        run.masters[0].signal(signal.SIGCONT)
        wait_for_line(run.masters[0], "steps down")
        for peer in peers:
            peer.tell(0)
        assert [peer.ends() for peer in peers] == [0] * 3


def test_masters_are_killed_and_started_one_after_the_other() -> None:
    with masters(PCCL_SHM="0") as run:
        peers = run.peers(3, partial(several_masters.reduce_in_steps, COUNT))
        for peer in peers:
            peer.expect("in")
        for index in (0, 1, 2, 0):
            for peer in peers:
                peer.tell(600)
            reach(peers, 0)
            run.kill(index)
            wait_for_line(run.masters[(index + 1) % 3], "taken over")
            assert finish(peers, 3) < SLACK
            run.restart(index)


def test_a_member_that_leaves_while_another_master_takes_over_says_so() -> None:
    with masters(PCCL_SHM="0") as run:
        (leaving,) = run.peers(1, several_masters.leave_when_told, PCCL_MIN_PEERS="3")
        program = partial(several_masters.reduce_in_steps, COUNT)
        others = run.peers(2, program, PCCL_MIN_PEERS="3")
        for peer in (leaving, *others):
            peer.expect("in")
        for peer in others:  # no master has a majority without them
            peer.signal(signal.SIGSTOP)
            wait_until_stopped(peer)
        run.kill(0)
        wait_for_line(leaving, "dialling again")
        leaving.tell("leave")
        leaving.expect("leaves")
        wait_until_asleep(leaving)
        for peer in others:
            peer.signal(signal.SIGCONT)
        assert leaving.ends() == 0
        wait_for_line(run.masters[1], "is out: it left; 2 members go on")
        for peer in others:
            peer.tell(10)
        finish(others, 2)


def test_a_newcomer_finds_the_master_that_serves() -> None:
    with masters() as run:
        members = run.peers(2, partial(several_masters.admit_a_newcomer, 3))
        for peer in members:
            peer.expect("in")
        run.kill(0)
        wait_for_line(run.masters[1], "taken over")
        run.restart(0)  # it is the first one that newcomers ask, and has no memory
        (late,) = run.peers(1, partial(several_masters.admit_a_newcomer, 3))
        for peer in members:
            assert peer.expect("done", 60) == {"event": "done", "ok": True, "size": 3}
        late.expect("in")
        assert late.expect("done", 60) == {"event": "done", "ok": True, "size": 3}


def test_a_newcomer_that_makes_way_joins_whatever_run_there_is() -> None:
    first, second = Pretended(2), Pretended(2)
    addresses = f"{first.address},{second.address}"
    peer = Worker(several_masters.join_and_fail, **FAST, PCCL_MASTER=addresses)
    try:
        for one in (first, second):
            assert one.joined() == (False, 0)
            one.dismiss(recovers=False)
        assert first.joined() == (True, 0)
        first.welcome(term=2, run=77)
        first.dismiss(recovers=True)  # members of another run have come
        for one in (second, first):
            assert one.joined() == (False, 0)
            one.dismiss(recovers=True)
    finally:
        peer.destroy()
        first.close()
        second.close()


def test_a_member_that_has_accepted_its_eviction_believes_another_master_that_tells_it() -> None:
    first, second = Pretended(2), Pretended(2)
    env = {"PCCL_HEARTBEAT_TIMEOUT": "60", "PCCL_RECONNECT_TIMEOUT": "60"}
    env["PCCL_MASTER"] = f"{first.address},{second.address}"
    member = Worker(partial(several_masters.reduce_until_it_is_lost, COUNT), **env)
    try:
        for one in (first, second):
            one.joined()
            one.dismiss(recovers=False)
        first.joined()
        first.welcome(term=2, run=77)
        first.admit(term=2, run=77)
        member.expect("in")
        member.tell("go")
        first.propose_nobody(term=2, run=77)
        first.close()
        second.evict(term=3, run=77)
        lost = member.expect("lost")
        assert (lost["kind"], "all were frozen" in lost["text"]) == ("Evicted", True), lost
    finally:
        member.destroy()
        first.close()
        second.close()


def test_a_run_begins_though_a_master_is_down_but_not_at_once() -> None:
    with masters() as run:
        run.kill(2)
        begun = time.monotonic()
        peers = run.peers(2, partial(several_masters.reduce_in_steps, COUNT))
        for peer in peers:
            assert peer.expect("in", 60)["size"] == 2
        # It could have served members, which would have had to notice that it is down, and to wait
        # for up to 3 s at each address.
        assert time.monotonic() - begun > TIMEOUT + 3 * 3
        for peer in peers:
            peer.tell(100)
        finish(peers, 2)


def test_another_group_begins_at_the_first_master_though_another_one_serves_the_run() -> None:
    with masters() as run:
        peers = [
            *run.peers(2, several_masters.change_to_another_group, PCCL_MIN_PEERS="4"),
            *run.peers(2, partial(several_masters.reduce_in_steps, COUNT), PCCL_MIN_PEERS="4"),
        ]
        for peer in peers:
            peer.expect("in")
        run.kill(0)
        wait_for_line(run.masters[1], "taken over")
        (early,) = run.peers(1, partial(several_masters.join_and_fail, peer_group=1, timeout=3.0))
        assert "lets this peer in" in early.expect("failed", 60)["text"]
        run.restart(0)
        for peer in peers[:2]:
            peer.tell("go")
        assert [peer.expect("done", 60)["size"] for peer in peers[:2]] == [2, 2]
        for peer in peers[2:]:
            peer.tell(200)
        for peer in peers[2:]:
            while (answer := peer.next(90))["event"] == "at":
                pass
            assert answer["sizes"] in ([2], [2, 3], [2, 4], [2, 3, 4]), answer


def test_a_group_of_the_library_begins_at_the_master_that_serves_the_run() -> None:
    with masters() as run:
        change = partial(several_masters.change_to_own_group, _core.OWN_GROUPS + 5)
        peers = [
            *run.peers(2, change, PCCL_MIN_PEERS="4"),
            *run.peers(2, partial(several_masters.reduce_in_steps, COUNT), PCCL_MIN_PEERS="4"),
        ]
        for peer in peers:
            peer.expect("in")
        run.kill(0)
        wait_for_line(run.masters[1], "taken over")
        for peer in peers[:2]:
            peer.tell("go")
        assert [peer.expect("done", 60)["size"] for peer in peers[:2]] == [2, 2]


def test_members_without_a_majority_are_told_that_the_master_is_lost() -> None:
    with masters(PCCL_SHM="0") as run:
        peers = run.peers(3, partial(several_masters.reduce_until_it_is_lost, COUNT))
        for peer in peers:
            peer.expect("in")
            peer.tell("go")
        for peer in peers[1:]:  # they must not come to another master before they die
            peer.signal(signal.SIGSTOP)
            wait_until_stopped(peer)
        for worker in (run.masters[0], *peers[1:]):
            worker.process.kill()
        lost = peers[0].expect("lost", 60)
        assert lost["kind"] == "MasterLost", lost


def test_false_reports_to_all_standbys_keep_nobody_out_when_the_master_is_gone() -> None:
    with masters(PCCL_SHM="0") as run:
        peers = run.peers(3, partial(several_masters.reduce_in_steps, COUNT))
        for peer in peers:
            peer.expect("in")
            peer.tell(1500)
        reach(peers, 100)
        liars = [Liar(standby, run.addresses[0], epoch=5) for standby in run.addresses[1:]]
        for liar in liars:
            assert liar.believed.wait(60)
        run.kill(0)  # the members come to the second one, which serves that epoch
        wait_for_line(run.masters[1], "more members have come from another epoch")
        wait_for_line(run.masters[1], "of 3 members are here")
        finish(peers, 3)
        for liar in liars:
            liar.close()


def test_a_peer_with_another_list_is_told() -> None:
    with masters() as run:
        members = run.peers(2, partial(several_masters.reduce_until_it_is_lost, COUNT))
        for peer in members:
            peer.expect("in")
        lists = {
            ",".join(reversed(run.addresses)): "another place in its own list",
            run.addresses[0]: "one of 3, and this peer has 1 address:",
            run.addresses[1]: "one of several, and this peer has 1 address:",
            ",".join(run.addresses[:2]): "one of 3, and this peer has 2 addresses:",
        }
        for addresses, why in lists.items():
            (odd,) = run.peers(1, several_masters.join_and_fail, PCCL_MASTER=addresses)
            failed = odd.expect("failed", 60)
            assert failed["kind"] == "InvalidArgument" and why in failed["text"], failed


def test_a_peer_with_another_secret_is_told() -> None:
    with masters() as run:
        (odd,) = run.peers(1, several_masters.join_and_fail, PCCL_SECRET=make_secret())
        failed = odd.expect("failed", 60)
        assert failed["kind"] == "AuthenticationFailed", failed


def test_a_run_without_a_machine_of_its_own_survives_the_peer_that_has_the_master() -> None:
    where = ",".join(f"127.0.0.1:{port}" for port in free_ports(3))
    env = {**FAST, "PCCL_MASTER": where, "PCCL_MIN_PEERS": "4", "PCCL_STANDBY": "1"}
    program = partial(several_masters.reduce_in_steps, COUNT)
    peers: list[Worker] = []
    try:
        for standby in ("1", "1", "1", "0"):
            peers.append(Worker(program, **{**env, "PCCL_STANDBY": standby}))
            if standby == "1":
                # The next one takes the next address.
                wait_for_port(int(where.split(",")[len(peers) - 1].rpartition(":")[2]))
        for peer in peers:
            assert peer.expect("in")["size"] == 4
            peer.tell(200)
        finish(peers, 4)
        for peer in peers[1:]:
            peer.tell(200)  # they wait for the first one
        peers[0].process.kill()
        finish(peers[1:], 3)
    finally:
        for peer in peers:
            peer.destroy()


@pytest.mark.parametrize("shm", ["1", "0"], ids=["shm", "tcp"])
def test_the_peer_that_has_the_master_leaves_and_the_last_one_goes_on(shm: str) -> None:
    where = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    env = {**FAST, "PCCL_SHM": shm, "PCCL_MASTER": where, "PCCL_MIN_PEERS": "2"}
    program = partial(several_masters.reduce_in_steps, COUNT)
    peers: list[Worker] = []
    try:
        for address in where.split(","):
            peers.append(Worker(program, **env, PCCL_STANDBY="1"))
            wait_for_port(int(address.rpartition(":")[2]))
        for peer in peers:
            assert peer.expect("in")["size"] == 2
            peer.tell(20)
        finish(peers, 2)
        peers[1].tell(200)  # it waits for the first one
        peers[0].tell(0)
        assert peers[0].ends() == 0
        finish(peers[1:], 1)
    finally:
        for peer in peers:
            peer.destroy()


def wait_for_port(port: int) -> None:
    """Returns once something listens there."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 60).close()
            return
        except ConnectionRefusedError:
            continue


@pytest.mark.root
def test_members_leave_a_master_that_is_cut_off(lab: Lab) -> None:
    hosts = lab(3)
    where = ",".join(at(host.address) for host in hosts)
    env = {**FAST, "PCCL_LOG_LEVEL": "INFO", "PCCL_BIND": "", "PCCL_MASTER": where}
    workers: list[Worker] = []

    def start(program: Program, host: Host) -> Worker:
        workers.append(worker_on(program, host, **env, PCCL_MIN_PEERS="2"))
        return workers[-1]

    try:
        serving = [
            start(partial(master.serve, "0.0.0.0:48148", None, [index, 3]), host)
            for index, host in enumerate(hosts)
        ]
        for one in serving:
            one.expect("listening")
        peers = [start(partial(several_masters.reduce_in_steps, COUNT), host) for host in hosts[1:]]
        for peer in peers:
            assert peer.expect("in", 60)["size"] == 2
            peer.tell(1000)
        reach(peers, 200)
        ip("-n", hosts[0].name, "link", "set", "eth", "down")
        assert finish(peers, 2) < TIMEOUT + SLACK
        wait_for_line(serving[0], "steps down")
        ip("-n", hosts[0].name, "link", "set", "eth", "up")
        for peer in peers:
            peer.tell(200)
        finish(peers, 2)
    finally:
        for worker in workers:
            worker.destroy()
