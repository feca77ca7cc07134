"""Peers on one host reduce in shared memory: who finds whom, what if there is none, what faults leave behind."""

import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest
from workers import Run, Worker, running

# Reduces until the plan is for shared memory (its epoch is the second), then as it is told.
REDUCE = """
start()
def reduce(count):
    total, info = pccl.allreduce(x(count), return_info=True)
    in_place = x(count)
    pccl.allreduce(in_place, out=in_place)
    return bool((total == expected(info)).all() and (in_place == total).all()), info
for _ in range(int(os.environ.get("WARM_UP", "100000"))):
    ok, info = reduce(10)
    if not ok or info.epoch > 1:
        break
say(event="in", ok=ok, epoch=info.epoch)
for line in sys.stdin:
    ok, info = reduce(json.loads(line))
    say(event="done", ok=ok, world=info.world_size, epoch=info.epoch)
pccl.shutdown()
"""


def together(peers: list[Worker], count: int) -> list[dict[str, object]]:
    for peer in peers:
        peer.tell(count)
    return [peer.expect("done", 60) for peer in peers]


def planned(run: Run) -> bool:
    return "planned for who shares memory" in run.master.stderr()


@pytest.mark.parametrize("world", [2, 3, 5])
def test_results_are_exact_at_every_size(world: int) -> None:
    with running(PCCL_LOG_LEVEL="INFO") as run:
        peers = run.peers(world, REDUCE)
        for peer in peers:
            assert peer.expect("in", 60) == {"event": "in", "ok": True, "epoch": 2}
        assert planned(run)
        # Around what fits behind an arrival, one block, one round of blocks, and the staging area.
        for count in (0, 1, 2, 511, 512, 513, 4096, 65_536, 300_001, 3_000_000):
            for answer in together(peers, count):
                assert answer == {"event": "done", "ok": True, "world": world, "epoch": 2}


@pytest.mark.parametrize("without", [{"PCCL_SHM": "0"}, {"PCCL_HOST_ID": "elsewhere"}])
def test_one_that_shares_no_memory_takes_all_to_the_network(without: dict[str, str]) -> None:
    with running(PCCL_LOG_LEVEL="INFO", WARM_UP="20", PCCL_MIN_PEERS="3") as run:
        peers = [run.peer(REDUCE), run.peer(REDUCE), run.peer(REDUCE, **without)]
        for peer in peers:
            assert peer.expect("in", 60)["ok"]
        for count in (1, 5000, 300_001):
            assert all(answer["ok"] for answer in together(peers, count))


def test_two_hosts_by_name_are_two_hosts() -> None:
    with running(PCCL_LOG_LEVEL="INFO", WARM_UP="20", PCCL_MIN_PEERS="2") as run:
        peers = [run.peer(REDUCE, PCCL_HOST_ID=name) for name in ("one", "two")]
        for peer in peers:
            assert peer.expect("in", 60)["ok"]
        assert all(answer["ok"] for answer in together(peers, 100_000))
        assert not planned(run)


def test_nothing_is_left_behind_by_the_killed() -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    with running() as run:
        peers = run.peers(3, REDUCE)
        for peer in peers:
            assert peer.expect("in", 60)["ok"]
        for peer in peers:
            peer.tell(3_000_000)
        for peer in peers:
            peer.signal(signal.SIGKILL)
            peer.ends()
        assert set(os.listdir("/dev/shm")) - before == set()


def test_strangers_at_a_peers_local_socket_disturb_nobody() -> None:
    with running() as run:
        peers = run.peers(2, REDUCE)
        for peer in peers:
            assert peer.expect("in", 60)["ok"]
        # Abstract sockets of this network namespace; other runs on this machine may have some too,
        # and are to bear this as well.
        names = {
            line.split()[-1][1:]
            for line in Path("/proc/net/unix").read_text().splitlines()
            if "@pccl-" in line
        }
        assert len(names) >= 2
        rng = random.Random(1)
        visitors = []
        for name in sorted(names):
            for size in (0, 1, 88, 88, 4096):
                visitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                visitors.append(visitor)
                visitor.connect(b"\0" + name.encode())
                junk = bytearray(rng.randbytes(size))
                junk[:6] = b"PCLL\1\0"[: len(junk)]
                if junk:
                    visitor.send(junk)
        assert all(answer["ok"] for answer in together(peers, 300_001))
        for visitor in visitors:
            visitor.close()
        assert all(answer["ok"] for answer in together(peers, 300_001))


LOOP = """
start()
say(event="in")
# Sums of so many stay exact whoever is in them.
mine = x(int(sys.argv[1]) if len(sys.argv) > 1 else 400_000)
array = mine.copy()
steps = 0
try:
    while not os.path.exists(os.environ["STOP"]):
        array[:] = mine
        _, info = pccl.allreduce(array, out=array, return_info=True)
        assert (array == expected(info)).all(), "a wrong sum"
        steps += 1
        if info.world_size == 2:
            pccl.allreduce(1)  # nobody is left out of the last one
            break
    say(event="end", world=info.world_size, steps=steps)
except pccl.errors.PCCLError as error:
    whole = bool((array == mine).all())
    say(event="out", kind=type(error).__name__, whole=whole)
"""


@pytest.mark.parametrize("seed", range(8))
def test_a_frozen_member_that_wakes_up_has_harmed_nobody(seed: int, tmp_path: Path) -> None:
    """Frozen anywhere in an operation, put out, resumed when the others have gone on."""
    env = {"PCCL_HEARTBEAT_TIMEOUT": "0.6", "PCCL_HEARTBEAT_INTERVAL": "0.1"}
    with running(**env, STOP=str(tmp_path / "never")) as run:
        peers = run.peers(3, LOOP)
        for peer in peers:
            peer.expect("in", 60)
        frozen = peers[seed % 3]
        time.sleep(0.2 + random.Random(seed).random() * 0.02)  # a moment, whichever
        frozen.signal(signal.SIGSTOP)
        for peer in peers:
            if peer is not frozen:
                assert peer.expect("end", 60)["world"] == 2
        frozen.signal(signal.SIGCONT)
        answer = frozen.next(30)
        # Its last operation may have been committed; then it finds out at the next.
        assert answer["event"] == "out", answer
        assert answer["kind"] in {"Evicted", "MasterLost", "Unreachable"}
        assert answer["whole"], answer
