"""Peers behind NATs, which cannot be dialled from outside: each pair is dialled from one side."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import namespaces
import nat
import pytest
from programs import doctor, nat_peers
from workers import Worker, eventually

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(nat.why_not() is not None, reason=str(nat.why_not())),
]

# Quicker than the defaults, so that a pair that cannot connect is found sooner.
SETTINGS = {
    "PCCL_HEARTBEAT_INTERVAL": "0.3",
    "PCCL_HEARTBEAT_TIMEOUT": "4",
    "PCCL_LINK_TIMEOUT": "1.5",
}


def start(
    where: Sequence[int | None],
    hosts: list[namespaces.Host],
    run: namespaces.HostsRun,
    **env: str,
) -> list[Worker]:
    return [
        run.peer(
            nat_peers.reduce_everything,
            host,
            PCCL_MIN_PEERS=str(len(where)),
            WORLD=str(len(where)),
            **env,
        )
        for host in hosts
    ]


def reduce_once_more(peers: list[Worker]) -> None:
    for peer in peers:
        peer.tell("go")
    for peer in peers:
        answer = peer.expect("again")
        assert answer["right"] and answer["size"] == len(peers), answer


@pytest.mark.parametrize(
    "where",
    [
        pytest.param((0, 1, None, None), id="2 behind NATs, 2 public"),
        pytest.param((None, None, 0, 1), id="2 public, 2 behind NATs"),
        pytest.param((0, 1, 2, None), id="3 behind NATs, 1 public"),
        pytest.param((None, 0, 1, 2), id="1 public, 3 behind NATs"),
        pytest.param((0, 0, 0), id="all behind one NAT"),
    ],
)
def test_peers_behind_nats_reduce(where: tuple[int | None, ...]) -> None:
    # The master has a public host of its own.
    with nat.hosts([*where, None]) as hosts, namespaces.running_on(hosts[-1], **SETTINGS) as run:
        peers = start(where, hosts[:-1], run)
        answers = [peer.expect("reduced", 60) for peer in peers]
        print([answer["seconds"] for answer in answers], answers[0]["schedules"])
        # Long before anybody would be put out for its links.
        reduce_once_more(peers)


def test_a_forwarded_port_is_found_where_it_was_named() -> None:
    # Outside it has another number than inside; and the others that are named lead nowhere.
    named = "nobody.invalid:7, 10.77.3.200, [fd00::1]:5, 10.77.3.100:4000"
    where = (0, 1)
    with (
        nat.hosts([*where, None], {0: (4000, 5000)}) as hosts,
        namespaces.running_on(hosts[-1], **SETTINGS) as run,
    ):
        world = {"PCCL_MIN_PEERS": "2", "WORLD": "2"}
        peers = [
            run.peer(
                nat_peers.reduce_everything,
                hosts[0],
                PCCL_PORT="5000",
                PCCL_ADVERTISE=named,
                **world,
            ),
            run.peer(nat_peers.reduce_everything, hosts[1], **world),
        ]
        print([peer.expect("reduced", 60)["seconds"] for peer in peers])
        reduce_once_more(peers)


def test_the_address_that_works_is_found_among_many_and_dialled_first_again() -> None:
    # Nothing listens where the first ones lead.
    named = ",".join([f"10.77.3.3:{6000 + i}" for i in range(29)] + ["10.77.3.100:4000"])
    settings = SETTINGS | {"PCCL_RELAY": "0", "PCCL_MIN_PEERS": "2"}
    with (
        nat.hosts([0, 1, None], {0: (4000, 5000)}) as hosts,
        namespaces.running_on(hosts[-1], **settings) as run,
    ):
        peers = [
            run.peer(nat_peers.reduce_or_sync, hosts[0], PCCL_PORT="5000", PCCL_ADVERTISE=named),
            run.peer(nat_peers.reduce_or_sync, hosts[1]),
        ]
        for word in (10, "cut", 10):
            for peer in peers:
                peer.tell(word)
            for peer in peers if word == 10 else []:
                answer = peer.expect("reduced")
                assert answer["right"] and answer["size"] == 2


def connections(host: namespaces.Host) -> set[tuple[str, str]]:
    """Of TCP: both ends, as this host sees them."""
    lines = namespaces.ip("netns", "exec", host.name, "ss", "-tnH", "state", "established")
    return {(words[2], words[3]) for words in map(str.split, lines.splitlines())}


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss")
def test_connections_at_rest_are_remembered_by_nats() -> None:
    # One that forgets after a second what nobody uses, and takes up nothing that it has forgotten.
    where = (0, None, None)
    with nat.hosts(where) as hosts, namespaces.running_on(hosts[-1], **SETTINGS) as run:
        nat.forget_after(0, 1)
        peers = start(where[:2], hosts[:2], run, PCCL_STRIPES="3")
        for peer in peers:
            peer.expect("reduced", 60)
        before = [connections(host) for host in hosts[:2]]
        assert all(len(ends) >= 4 for ends in before)  # to the master, and three stripes
        assert not threading.Event().wait(3)  # this is what is tested
        assert [connections(host) for host in hosts[:2]] == before
        reduce_once_more(peers)
        assert [connections(host) for host in hosts[:2]] == before


# Quicker still: what is silent is found after a second.
SILENT = SETTINGS | {
    "PCCL_HEARTBEAT_INTERVAL": "0.2",
    "PCCL_HEARTBEAT_TIMEOUT": "1",
    "PCCL_STRIPES": "1",
}


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss")
@pytest.mark.parametrize(
    "where",
    [
        pytest.param((None, None, None), id="direct"),
        pytest.param((0, 1), id="through the master"),
    ],
)
def test_links_whose_connections_are_forgotten_are_dialled_again(
    where: tuple[int | None, ...],
) -> None:
    settings = SILENT | ({"PCCL_RELAY": "0"} if where[0] is None else {})
    size = len(where)
    with nat.hosts([*where, None]) as hosts, namespaces.running_on(hosts[-1], **settings) as run:
        first = run.peer(nat_peers.reduce_or_sync, hosts[0], PCCL_MIN_PEERS=str(size))
        control = eventually(lambda: connections(hosts[0]))
        peers = [first]
        peers += [
            run.peer(nat_peers.reduce_or_sync, host, PCCL_MIN_PEERS=str(size))
            for host in hosts[1:-1]
        ]

        def reduce() -> None:
            for peer in peers:
                peer.tell(10)
            for peer in peers:
                answer = peer.expect("reduced", 60)
                assert answer["right"] and answer["size"] == size, answer

        reduce()
        assert len(control) == 1
        links = connections(hosts[0]) - control
        assert len(links) == size - 1
        nat.forget(hosts[0], links)
        reduce()
        assert control < connections(hosts[0])


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss")
def test_links_of_a_newcomer_that_waits_are_dialled_again() -> None:
    with nat.hosts((None,) * 4) as hosts, namespaces.running_on(hosts[-1], **SILENT) as run:
        members = [
            run.peer(nat_peers.reduce_or_sync, host, PCCL_MIN_PEERS="2") for host in hosts[:2]
        ]
        for peer in members:
            peer.tell(10)
        for peer in members:
            peer.expect("reduced")
        newcomer = run.peer(nat_peers.reduce_or_sync, hosts[2])
        newcomer.tell("sync")  # it waits in it for the members
        assert eventually(lambda: len(connections(hosts[2])) == 3)
        control = {ends for ends in connections(hosts[2]) if ends[1].endswith(":48148")}
        links = connections(hosts[2]) - control
        assert len(control) == 1
        nat.forget(hosts[2], links)
        eventually(lambda: len(connections(hosts[2]) - links) == 3)
        size = 2
        while size < 3:
            for peer in members:
                peer.tell("sync")
            size = max(peer.expect("synced")["size"] for peer in members)
        assert newcomer.expect("synced")["size"] == 3


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss")
def test_the_kernel_keeps_connections_alive_whatever_heartbeats_are_set_to() -> None:
    slow = {"PCCL_HEARTBEAT_INTERVAL": "60", "PCCL_HEARTBEAT_TIMEOUT": "200"}
    where = (0, None)
    with nat.hosts([*where, None]) as hosts, namespaces.running_on(hosts[-1], **slow) as run:
        peers = start(where, hosts[:2], run, PCCL_STRIPES="2")
        for peer in peers:
            peer.expect("reduced", 60)
        for host in hosts[:2]:
            lines = namespaces.ip("netns", "exec", host.name, "ss", "-tnoH", "state", "established")
            timers = [line for line in lines.splitlines() if "timer:(" in line]
            assert len(timers) >= 3
            for line in timers:
                # As "timer:(keepalive,14sec,0)"; a word that is under way has another one.
                seconds = re.search(r"timer:\(keepalive,(\d+)", line)
                assert "keepalive" not in line or (seconds and int(seconds[1]) <= 15), line
            assert any("keepalive" in line for line in timers)


def steps_until(
    worker: Worker, last: Callable[[dict[str, Any]], bool], timeout: float = 60
) -> list[dict[str, Any]]:
    """Its steps, up to the first that is the last one looked for."""
    steps: list[dict[str, Any]] = []
    deadline = time.monotonic() + timeout
    while not steps or not last(steps[-1]):
        assert time.monotonic() < deadline, steps[-3:]
        steps.append(worker.next())
    return steps


def until(worker: Worker, size: int) -> list[dict[str, Any]]:
    """Its steps, up to the first among so many."""
    return steps_until(worker, lambda step: step.get("size") == size)


def over_the_outage(worker: Worker) -> list[dict[str, Any]]:
    """Its steps, up to the first among three after the one that took long or lost a member.

    They end with its error if it was put out.
    """
    # New connections are looked for after two intervals of silence.
    steps = steps_until(
        worker,
        lambda step: step["event"] != "step" or step["took"] >= 0.4 or step["size"] != 3,
    )
    return steps if steps[-1]["event"] != "step" else steps + until(worker, 3)


def test_a_peer_whose_address_changes_goes_on_and_the_others_see_one_loss_at_most() -> None:
    settings = SETTINGS | {"PCCL_HEARTBEAT_TIMEOUT": "2"}
    with nat.hosts((None,) * 4) as hosts, namespaces.running_on(hosts[-1], **settings) as run:
        peers = [run.peer(nat_peers.come_back, host) for host in hosts[:3]]
        for peer in peers:
            until(peer, 3)
        moved = hosts[2].name
        namespaces.ip(*f"-n {moved} addr del {hosts[2].address}/24 dev eth".split())
        namespaces.ip(*f"-n {moved} addr add 10.77.3.77/24 dev eth".split())
        for peer in peers[:2]:
            steps = over_the_outage(peer)
            assert steps[-1]["event"] == "step", steps[-1]
            sizes = [key for key, _ in itertools.groupby(step["size"] for step in steps)]
            # It is back at the master before that counts it as silent, or after it.
            assert sizes in ([3], [3, 2, 3], [2, 3]), sizes
            # The documented time, and some for a busy machine.
            assert max(step["took"] for step in steps) < 2 + 6
        line = over_the_outage(peers[2])[-1]
        if line["event"] == "out":
            assert until(peers[2], 3)[0]["step"] > line["step"] + 1  # what the others had done


def test_two_that_have_no_way_to_each_other_are_told_soon_and_what_to_do() -> None:
    settings = SETTINGS | {"PCCL_RELAY": "0"}
    with nat.hosts((0, 1, None)) as hosts, namespaces.running_on(hosts[-1], **settings) as run:
        peers = [
            run.peer(nat_peers.reduce_or_say_why, host, PCCL_MIN_PEERS="2") for host in hosts[:2]
        ]
        answers = [peer.next() for peer in peers]
        alone, error = sorted(answers, key=lambda answer: answer["event"])
        assert (alone["event"], alone["size"]) == ("alone", 1)
        # The documented time, and some for a busy machine.
        assert alone["seconds"] < 1.5 + 4 + 8
        assert (error["name"], error["advice"]) == ("Unreachable", "rejoin")
        assert "PCCL_PORT" in error["reason"] and "PCCL_ADVERTISE" in error["reason"]
        # Nor is a newcomer let in to who cannot be reached.
        newcomer = run.peer(
            nat_peers.reduce_or_say_why, hosts[answers.index(error)], PCCL_MIN_PEERS="1"
        )
        answer = newcomer.next()
        assert (answer["event"], answer["name"]) == ("error", "Unreachable"), answer


def test_the_master_says_how_much_has_gone_through_it() -> None:
    count = 2_000_000
    settings = SETTINGS | {"PCCL_LOG_LEVEL": "INFO"}
    with nat.hosts((0, 1, None)) as hosts, namespaces.running_on(hosts[-1], **settings) as run:
        peers = [
            run.peer(partial(nat_peers.reduce_once, count), host, PCCL_MIN_PEERS="2")
            for host in hosts[:2]
        ]
        for peer in peers:
            assert peer.ends(60) == 0, peer.stderr()
        # Each sends as much as the whole array (docs/guide/cloud-and-home.md), in frames.
        array = 8 * count
        eventually(lambda: relayed_bytes(run.master) >= 2 * array, said=run.master.stderr)
        assert relayed_bytes(run.master) < 3 * array


def relayed_bytes(master: Worker) -> int:
    """As its log says, of links that have ended."""
    lines = re.findall(r"relayed (\d+) bytes between peers \S+ and \S+ in", master.stderr())
    return sum(map(int, lines))


def ask_the_doctor(
    run: namespaces.HostsRun, host: namespaces.Host, **env: str
) -> tuple[int, dict[str, dict[str, str]]]:
    """Its exit status, and its checks by name."""
    found = run.peer(doctor.look, host, **env).expect("doctor")
    return found["status"], {
        check["name"]: check for check in json.loads(found["screen"])["checks"]
    }


def test_the_doctor_tells_who_is_behind_a_nat() -> None:
    with nat.hosts((0, 1, None, None)) as hosts:
        with namespaces.running_on(hosts[-1], **SETTINGS) as run:
            run.peer(nat_peers.wait, hosts[2]).expect("in")
            status, checks = ask_the_doctor(run, hosts[0])
            assert status == 0
            assert checks["from outside"]["verdict"] == "warn"
            assert nat.address_of_nat(0) in checks["from outside"]["text"]
            text = checks["peers"]["text"]
            assert "of 1 tried 1 are reached" in text and "0 reach this machine" in text
        # The two have the same private address, and in the first pair the same port.
        for relay, status, port in (("0", 1, "5000"), ("1", 0, "")):
            with namespaces.running_on(hosts[-1], **SETTINGS, PCCL_RELAY=relay) as run:
                run.peer(nat_peers.wait, hosts[1], PCCL_PORT=port).expect("in")
                found, checks = ask_the_doctor(run, hosts[0], PCCL_PORT=port)
                assert found == status, checks
                text = checks["peers"]["text"]
                assert "neither end reaches the other" in text
                assert ("the master relays" in text) == (relay == "1")


def test_the_doctor_tries_a_forwarded_port_and_judges_by_nothing_untried() -> None:
    where = (0, 1, None)
    settings = SETTINGS | {"PCCL_RELAY": "0"}
    forwarded = f"{nat.address_of_nat(0)}:4000"
    with (
        nat.hosts(where, {0: (4000, 5000)}) as hosts,
        namespaces.running_on(hosts[-1], **settings) as run,
    ):
        run.peer(nat_peers.wait, hosts[1]).expect("in")
        status, checks = ask_the_doctor(run, hosts[0], PCCL_PORT="5000", PCCL_ADVERTISE=forwarded)
        assert status == 0 and checks["from outside"]["verdict"] == "ok", checks
        assert "port 4000" in checks["from outside"]["text"]
        assert "1 reach this machine" in checks["peers"]["text"]
        for named, can in (("10.77.3.200:4000", True), (f"{nat.address_of_nat(0)}:4001", False)):
            status, checks = ask_the_doctor(run, hosts[0], PCCL_PORT="5001", PCCL_ADVERTISE=named)
            assert (status == 0) == can, checks
            assert ("advertised" in checks) == can
            assert checks["from outside"]["verdict"] == "warn"
