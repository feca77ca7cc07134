"""Peers of one host reduce in shared memory: discovery, hosts without it, and what faults leave."""

import random
import signal
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from programs import shm
from workers import Run, Worker, eventually, running

pytestmark = pytest.mark.shared_memory

# Enough elements to tell memory from the network by what is sent.
MANY = 300_001


def together(peers: list[Worker], count: int) -> list[dict[str, Any]]:
    for peer in peers:
        peer.tell(count)
    return [peer.expect("done", 60) for peer in peers]


def until(
    peers: list[Worker], holds: Callable[[dict[str, Any]], bool], count: int = MANY
) -> list[dict[str, Any]]:
    """Reduces until `holds` of every answer: what follows a change takes a moment."""
    deadline = time.monotonic() + 30
    while True:
        answers = together(peers, count)
        assert all(answer["ok"] for answer in answers), answers
        if all(holds(answer) for answer in answers):
            return answers
        assert time.monotonic() < deadline, answers


def join(run: Run, members: list[Worker]) -> Worker:
    """A newcomer on this host, let in, and in memory with the others."""
    late = run.peer(shm.reduce_as_told, WARM_UP="0")
    late.expect("in")
    late.tell(MANY)  # it waits in there

    def admitted() -> bool:
        for peer in members:
            peer.tell("admit")
        return bool([peer.expect("admitted")["some"] for peer in members][0])

    eventually(admitted)
    for peer in members:
        peer.tell(MANY)
    assert all(peer.expect("done", 60)["ok"] for peer in [*members, late])
    world = len(members) + 1
    until([*members, late], lambda answer: answer["memory"] and answer["world"] == world)
    return late


def planned(run: Run) -> bool:
    return "planned for changed memory sharing" in run.master.stderr()


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.env(PCCL_LOG_LEVEL="INFO")
def test_results_are_exact_at_every_size(run: Run, world: int) -> None:
    peers = run.peers(world, shm.reduce_as_told)
    for peer in peers:
        assert peer.expect("in", 60)["ok"]
    assert planned(run)
    # The master plans for parts of the group when a member takes long to find the others.
    epoch = until(peers, lambda answer: answer["memory"])[0]["epoch"]
    # Around what fits behind an arrival, one round of one block each, several rounds, and the
    # staging area.
    round_of_blocks = world * (32 << 10) // 8
    around = (round_of_blocks - 1, round_of_blocks, round_of_blocks + 1)
    for count in (0, 1, 2, 511, 512, 513, 4096, *around, 65_536, MANY, 3_000_000):
        for answer in together(peers, count):
            assert (answer["ok"], answer["world"], answer["epoch"]) == (True, world, epoch)
            assert answer["memory"] or count < MANY


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.env(PCCL_HEARTBEAT_TIMEOUT="60")  # a busy machine may take longer than the usual one
def test_collectives_need_no_master(run: Run, world: int) -> None:
    peers = run.peers(world, shm.collect_as_told)
    for peer in peers:
        peer.expect("in", 60)
    run.master.signal(signal.SIGSTOP)
    try:
        # Around what fits behind an arrival, one block, several blocks, and the staging area.
        inlined, block = (4 << 10) // 8, (32 << 10) // 8
        around = [size + more for size in (inlined, block, world * block) for more in (-1, 0, 1)]
        counts = (0, 1, inlined // world, *around, 65_536, MANY, 1_500_000)
        orders = [("elements", count) for count in counts]
        # Up to 512 arrays are read directly.
        for order in (*orders, ("arrays", 5), ("arrays", 200), ("arrays", 600)):
            for peer in peers:
                peer.tell(order)
            for peer in peers:
                assert peer.expect("done", 20)["wrong"] == [], order
    finally:
        run.master.signal(signal.SIGCONT)


@pytest.mark.parametrize("without", [{"PCCL_SHM": "0"}, {"PCCL_HOST_ID": "elsewhere"}])
@pytest.mark.env(PCCL_LOG_LEVEL="INFO", WARM_UP="20", PCCL_MIN_PEERS="3")
def test_one_that_shares_no_memory_takes_all_to_the_network(
    run: Run, without: dict[str, str]
) -> None:
    peers = [
        run.peer(shm.reduce_as_told),
        run.peer(shm.reduce_as_told),
        run.peer(shm.reduce_as_told, **without),
    ]
    for peer in peers:
        assert peer.expect("in", 60)["ok"]
    for count in (1, 5000, MANY):
        answers = together(peers, count)
        assert all(answer["ok"] for answer in answers)
    assert not any(answer["memory"] for answer in answers)


@pytest.mark.env(PCCL_LOG_LEVEL="INFO", WARM_UP="20", PCCL_MIN_PEERS="2")
def test_two_hosts_by_name_are_two_hosts(run: Run) -> None:
    peers = [run.peer(shm.reduce_as_told, PCCL_HOST_ID=name) for name in ("one", "two")]
    for peer in peers:
        assert peer.expect("in", 60)["ok"]
    assert all(answer["ok"] for answer in together(peers, 100_000))
    assert not planned(run)


def test_nothing_is_left_behind_by_the_killed(run: Run) -> None:
    """Newcomers are killed within operations. The others hold no more than after the first one."""
    stay = run.peers(2, shm.reduce_as_told)
    for peer in stay:
        assert peer.expect("in", 60)["ok"]
    most: dict[str, int] = {}
    for cycle in range(5):
        late = join(run, stay)
        for peer in [*stay, late]:
            peer.tell(MANY * (cycle + 1))
        late.signal(signal.SIGKILL)
        late.ends()
        assert all(peer.expect("done", 60)["ok"] for peer in stay)
        answers = until(
            stay,
            lambda answer: (
                answer["memory"]
                and answer["world"] == 2
                and all(answer[what] <= most[what] for what in most)
            ),
        )
        if not most:
            # Two boards, a page, the results of each; and both ends of a pipe, if the newcomer
            # was long in finding them.
            assert max(answer["mappings"] for answer in answers) <= 7
            most["mappings"] = 7
            most["descriptors"] = max(answer["descriptors"] for answer in answers) + 1


def test_memory_for_results_that_were_read_is_let_go(run: Run) -> None:
    peers = run.peers(3, shm.reduce_as_told)
    for peer in peers:
        assert peer.expect("in", 60)["ok"]
    for count in (MANY, 2 * MANY, 4 * MANY, 7 * MANY, 10 * MANY, 14 * MANY):
        answers = together(peers, count)
        assert all(answer["ok"] and answer["memory"] for answer in answers)
        # A board and the results of each, and the page; pipes, if one was long in coming.
        assert max(answer["mappings"] for answer in answers) <= 7 + 2 * 2


def visit(name: bytes) -> socket.socket:
    visitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    visitor.settimeout(10)
    visitor.connect(b"\0" + name)
    return visitor


def say_to(visitor: socket.socket, what: bytes, descriptors: list[int]) -> None:
    try:
        socket.send_fds(visitor, [what], descriptors)
    except OSError:
        pass  # it was thrown out already


def test_strangers_at_a_peers_local_socket_disturb_nobody() -> None:
    with running() as run, open("/dev/null") as null:
        # A quarter of the descriptors may be of strangers.
        peers = run.peers(2, partial(shm.reduce_as_told, open_files=300))
        ids = []
        for peer in peers:
            answer = peer.expect("in", 60)
            assert answer["ok"]
            ids.append(answer["peer"])
        before = until(peers, lambda answer: answer["memory"])
        rng = random.Random(1)
        some = [null.fileno()] * 4
        visitors = []
        for me in ids:
            name = f"pccl-{me}".encode()
            for size in (0, 1, 87, 88, 88, 89, 4096):
                for descriptors in ([], some):
                    visitors.append(visit(name))
                    junk = bytearray(rng.randbytes(size))
                    junk[:6] = b"PCLL\2\0"[: len(junk)]
                    # Empty and junk, then whatever else comes to mind.
                    say_to(visitors[-1], bytes(junk), descriptors)
                    say_to(visitors[-1], b"", descriptors)
            # All kinds, well formed, from a member and from nobody; the word is wrong.
            for kind in range(5):
                for other in ids:
                    for descriptors in ([], some[:1]):
                        visitors.append(visit(name))
                        packet = struct.pack(
                            "<4sHHQQQQ16s16s16s",
                            *(b"PCLL", 2, kind, 0, 1, 4096, rng.randrange(4)),
                            *(bytes.fromhex(other), bytes.fromhex(me), rng.randbytes(16)),
                        )
                        say_to(visitors[-1], packet, descriptors)
            # And more who say nothing than there is room for.
            visitors += [visit(name) for _ in range(80)]
        for answer in together(peers, MANY):
            assert answer["ok"] and answer["memory"]
        # A peer of the run gets through all the same.
        peers.append(join(run, peers))
        for visitor in visitors:
            visitor.close()
        peers.pop().tell("stop")
        until(
            peers,
            lambda answer: (
                answer["memory"]
                and answer["world"] == 2
                and answer["descriptors"] <= max(held["descriptors"] for held in before)
            ),
        )


def test_a_limit_of_files_ends_no_program(run: Run) -> None:
    peers = run.peers(2, shm.reduce_with_short_files)
    for peer in peers:
        for _ in range(5):
            assert peer.expect("done", 60)["ok"]
    for peer in peers:
        peer.ends()
        assert "ulimit -f" in peer.stderr()


@pytest.mark.parametrize("seed", range(8))
def test_a_frozen_member_that_wakes_up_has_harmed_nobody(seed: int) -> None:
    """It is frozen anywhere in an operation, evicted, and resumed when the others have gone on."""
    env = {"PCCL_HEARTBEAT_TIMEOUT": "0.6", "PCCL_HEARTBEAT_INTERVAL": "0.1"}
    rng = random.Random(seed)
    with running(**env) as run:
        peers = run.peers(3, shm.reduce_until_one_is_lost)
        for peer in peers:
            peer.expect("in", 60)
        frozen = peers[seed % 3]
        for _ in range(rng.randrange(1, 15)):
            frozen.expect("step")
        time.sleep(rng.random() * 0.005)  # a moment, whichever
        frozen.signal(signal.SIGSTOP)
        for peer in peers:
            if peer is not frozen:
                answer = past_steps(peer)
                assert answer["event"] == "end", answer
                assert (answer["world"], answer["memory"]) == (2, True)
        frozen.signal(signal.SIGCONT)
        answer = past_steps(frozen)
        # Its last operation may have been committed; then it finds out at the next.
        assert answer["event"] == "out", answer
        assert answer["kind"] in {"Evicted", "MasterLost", "Unreachable"}
        assert answer["whole"], answer


def past_steps(peer: Worker) -> dict[str, Any]:
    while (answer := peer.next(60))["event"] == "step":
        pass
    return answer
