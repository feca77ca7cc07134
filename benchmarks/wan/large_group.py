"""Measures how long calls of a group of dozens of members take, with a delay between all of them.

    python benchmarks/wan/large_group.py [--members 48] [--delay 12.5] [--calls 5] [--json FILE]

Each member is a thread of this process on a host of its own in the lab (`lab.py`), whose links have
a delay and no other limit, and one connection. So the figures tell how many hops a call takes, not
how many bytes real links carry. Needs root.

Gives the median time of the slowest member in milliseconds, and in delays. A ring of n members
takes 2 (n - 1) of them, without the two of the verdict. The goal: small arrays need at
least one fewer.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from lab import Host, Lab

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from report import Table, announce, goal, milliseconds, size_name, write_results

import pccl

SMALL = "all-reduce, 1 KiB"


def enter(namespace: str) -> None:
    """Moves this thread, and those that it starts from now on, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def allreduce(size: int, **how: Any) -> Callable[[pccl.Communicator], object]:
    array = np.ones(size // 4, np.float32)
    return lambda comm: pccl.allreduce(array, "avg", comm=comm, **how)


def exchange(size: int, members: int) -> Callable[[pccl.Communicator], object]:
    array = np.ones((members, size // 4), np.float32)
    return lambda comm: pccl.alltoall(array, comm=comm)


def gather(size: int) -> Callable[[pccl.Communicator], object]:
    array = np.ones(size // 4, np.float32)
    return lambda comm: pccl.allgather(array, comm=comm)


def calls(members: int) -> dict[str, Callable[[pccl.Communicator], object]]:
    """The measured calls, by name."""
    made = {}
    for size in (1 << 10, 64 << 10, 1 << 20, 4 << 20):
        made[f"all-reduce, {size_name(size)}"] = allreduce(size)
    made["all-reduce, 1 MiB, int8"] = allreduce(1 << 20, quantize="int8")
    made["all-gather, 1 KiB each"] = gather(1 << 10)
    made["all-to-all, 4 KiB for each"] = exchange(4 << 10, members)
    return made


class Group:
    """The members, and what they have measured."""

    def __init__(self, lab: Lab, count: int) -> None:
        self._lab = lab
        self._count = count
        self._meet = threading.Barrier(len(lab.hosts), timeout=120)
        self._took = np.zeros(len(lab.hosts))
        self._master = ""
        self.seconds: dict[str, list[float]] = {}

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._member, args=(host,))
            for host in range(len(self._lab.hosts))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._meet.broken:
            raise SystemExit("a member failed, see above")

    def _member(self, host: int) -> None:
        try:
            enter(self._lab.namespace(host))
            if host == 0:
                with pccl.MasterNode(f"{self._lab.address(0)}:0") as master:
                    self._master = master.address
                    self._take_part(host)
            else:
                self._take_part(host)
        except BaseException:
            self._meet.abort()
            raise

    def _take_part(self, host: int) -> None:
        members = len(self._lab.hosts)
        self._meet.wait()
        comm = pccl.Communicator(self._master)
        comm._join("init", min_peers=members, attempts=5, timeout=60.0, enter=False)
        for name, call in calls(members).items():
            for number in range(self._count + 1):  # the first one is not counted
                self._meet.wait()
                begin = time.perf_counter()
                call(comm)
                self._took[host] = time.perf_counter() - begin
                self._meet.wait()
                if host == 0 and number > 0:
                    self.seconds.setdefault(name, []).append(float(self._took.max()))
        self._meet.wait()
        comm.close()
        self._meet.wait()


def ring_goal(seconds: list[float], members: int, delay_ms: float) -> dict[str, Any]:
    """Prints that of the smallest all-reduce: a tree's hops in place of a ring's."""
    delays = [1e3 * one / delay_ms for one in seconds]
    name = f"{SMALL}, {members} members: delays, at least one below the hops of a ring"
    ring = 2 * (members - 1)
    return goal(name, statistics.median(delays), delays, "{:.1f}".format, at_most=ring - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--members", type=int, default=48)
    parser.add_argument("--delay", type=float, default=12.5, help="one way, in milliseconds")
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    if not 2 <= args.members <= 64 or args.calls < 1 or args.delay <= 0:
        parser.error("2 to 64 members, a call at least, and a delay")
    os.environ.update(PCCL_STRIPES="1", PCCL_THREADS="1", PCCL_MEASURE_AFTER="0")
    about = announce()
    with Lab([Host()] * args.members, delay_ms=args.delay) as lab:
        group = Group(lab, args.calls)
        group.run()
    title = f"{args.members} members, {args.delay:g} ms from each to each"
    table = Table(title, ["call", "ms", "least", "most", "delays"])
    for name, times in group.seconds.items():
        middle = statistics.median(times)
        cells = [milliseconds(seconds) for seconds in (middle, min(times), max(times))]
        table.add([name, *cells, f"{middle * 1e3 / args.delay:.0f}"])
    print()
    goals = [ring_goal(group.seconds[SMALL], args.members, args.delay)]
    found = {"members": args.members, "delay": args.delay, "seconds": group.seconds}
    write_results(args.json, about, **found, goals=goals)
    if args.markdown is not None:
        args.markdown.write_text(table.markdown())


if __name__ == "__main__":
    main()
