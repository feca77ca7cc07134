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
from programs import leaks
from workers import Run, Worker

CYCLES = int(os.environ.get("PCCL_LEAK_CYCLES", "500"))
WARM_UP = 96  # pools, caches and the allocator have their size by then
# Pages that the allocator holds. A leak of 2 KiB a cycle is found; measured growth is below
# 100 KiB.
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


@dataclass(frozen=True)
class Held:
    """Resources that a process holds."""

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
    """Returns what it holds, a few seconds later if something is on its way out."""
    deadline = time.monotonic() + 5
    held = Held.by(worker)
    while before is not None and not held.level_with(before) and time.monotonic() < deadline:
        time.sleep(0.1)
        held = Held.by(worker)
    return held


@pytest.mark.timeout(120 + 0.3 * CYCLES)
@pytest.mark.env(**SETTINGS)
def test_the_master_and_a_member_hold_the_same_after_hundreds_of_peers_came_and_went(
    run: Run,
) -> None:
    survivor = run.peer(leaks.stay)
    survivor.expect("in")
    churn = run.peer(leaks.come_and_go)
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
