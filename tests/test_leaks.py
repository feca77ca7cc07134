"""Peers that come and go leave nothing behind in the master and in a member that stays.

PCCL_LEAK_CYCLES says how many (default 500).
"""

import os
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from workers import Worker, running

CYCLES = int(os.environ.get("PCCL_LEAK_CYCLES", "500"))
WARM_UP = 96  # pools, caches and the allocator have their size by then
# Pages that the allocator holds. So a leak of 2 KiB a cycle is found; measured growth is below 100 KiB.
RSS_NOISE_BYTES = 512 << 10
RSS_BYTES_PER_CYCLE = 512

SETTINGS = {
    "PCCL_HEARTBEAT_INTERVAL": "0.3",
    "PCCL_HEARTBEAT_TIMEOUT": "3",
    "PCCL_LINK_TIMEOUT": "1.5",
    # Makes the memory of a process say what it uses, not what its threads happened to do.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}

# Steps like those of the peers that come and go; in between they are told to be measured.
STEP = """
def step(state):
    state, info = pccl.sync(state, return_info=True)
    works = [pccl.allreduce_async(x(1000), tag=tag) for tag in range(3)]
    total, reduced = pccl.allreduce({"x": x(20_000), "n": 1}, return_info=True)
    assert total["n"] == reduced.world_size and (total["x"] == expected(reduced)).all()
    for work in works:
        work.wait()
    state["step"] += 1
    return state, info.world_size
"""

SURVIVOR = (
    STEP
    + """
import ctypes, gc, queue
orders = queue.Queue()
def listen():
    for line in sys.stdin:
        orders.put(json.loads(line))
threading.Thread(target=listen, daemon=True).start()
start()
say(event="in")
state, wanted = {"w": np.zeros(200_000), "step": 0}, None
while True:
    state, size = step(state)
    if wanted is None and not orders.empty():
        wanted = orders.get()
    if wanted and size == 1:
        del size
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        say(event="alone", step=state["step"])
        wanted = None
        orders.get()
"""
)

# Forks newcomers, which is faster than to start them, and ends them: by a leave, in the middle of a step, or even
# before they are in.
CHURN = (
    STEP
    + """
import random, time, traceback
import numpy.ma  # what the first sync would import in every child
BATCH = 8
rng = random.Random(1)

def newcomer(told):
    leave = []
    signal.signal(signal.SIGTERM, lambda *_: leave.append(1))
    status = 1
    try:
        start()
        state = {"w": np.ones(200_000), "step": -1}
        while not leave:
            state, size = step(state)
            os.write(told, b".")
        if rng.random() < 0.5:
            pccl.shutdown()  # else at exit, which is the same
        else:
            pccl.api._default.close()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)

while True:
    for _ in range(0, hear(), BATCH):
        children = []
        for number in range(BATCH):
            heard, told = os.pipe()
            child = os.fork()
            if child == 0:
                newcomer(told)
            os.close(told)
            children.append((child, heard, number))
        early = rng.random() < 0.5
        for child, heard, number in children:
            if number == BATCH - 1 and early:
                time.sleep(rng.random() * 0.05)  # the random moment
            else:
                assert os.read(heard, 1), "a newcomer ended before it was in"
            os.kill(child, signal.SIGTERM if number < BATCH // 2 else signal.SIGKILL)
            os.close(heard)
        for child, _, number in children:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code == (0 if number < BATCH // 2 else -signal.SIGKILL), code
    say(event="over")
"""
)


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    threads: int
    descriptors: dict[str, int]  # by kind: socket, pipe, anon_inode:[eventpoll] ...
    shared_mappings: int
    shared_files: frozenset[str]  # of the whole machine
    resident: int  # bytes, private

    @classmethod
    def by(cls, worker: Worker) -> "Held":
        process = Path(f"/proc/{worker.pid}")
        kinds: Counter[str] = Counter()
        for descriptor in (process / "fd").iterdir():
            kinds[re.sub(r":\[\d+\]|\d+", "", os.readlink(descriptor))] += 1
        maps = (process / "maps").read_text()
        rss = re.search(r"RssAnon:\s+(\d+) kB", (process / "status").read_text())
        assert rss is not None
        return cls(
            threads=len(list((process / "task").iterdir())),
            descriptors=dict(kinds),
            shared_mappings=len(re.findall(r"/dev/shm|memfd:", maps)),
            shared_files=frozenset(name for name in os.listdir("/dev/shm") if "pccl" in name),
            resident=int(rss[1]) << 10,
        )

    def level_with(self, before: "Held") -> bool:
        """Whether there is no more than before, memory aside."""
        return (
            self.threads <= before.threads
            and not Counter(self.descriptors) - Counter(before.descriptors)
            and self.shared_mappings <= before.shared_mappings
            and self.shared_files <= before.shared_files
        )


def settled(worker: Worker, before: Held | None) -> Held:
    """What it holds; what is on its way out gets a few seconds."""
    deadline = time.monotonic() + 5
    held = Held.by(worker)
    while before is not None and not held.level_with(before) and time.monotonic() < deadline:
        time.sleep(0.1)
        held = Held.by(worker)
    return held


@pytest.mark.timeout(120 + 0.3 * CYCLES)
def test_the_master_and_a_member_hold_the_same_after_hundreds_of_peers_came_and_went() -> None:
    with running(**SETTINGS) as run:
        survivor = run.peer(SURVIVOR)
        survivor.expect("in")
        churn = run.peer(CHURN)
        watched = {"survivor": survivor, "master": run.master}
        held: dict[str, list[Held]] = {name: [] for name in watched}
        for cycles in (WARM_UP, CYCLES // 2, CYCLES - CYCLES // 2):
            churn.tell(cycles)
            churn.expect("over", 60 + 0.3 * cycles)
            survivor.tell("measure")
            survivor.expect("alone", 60)
            for name, worker in watched.items():
                held[name].append(settled(worker, held[name][0] if held[name] else None))
                print(cycles, name, held[name][-1])
            survivor.tell("go on")
        for name, (before, _, after) in held.items():
            assert after.level_with(before), f"{name}: {before}, later {after}"
            growth = after.resident - before.resident
            assert growth < RSS_NOISE_BYTES + RSS_BYTES_PER_CYCLE * CYCLES, f"{name}: {held[name]}"
