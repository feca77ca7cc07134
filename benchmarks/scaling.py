"""How much faster `pccl.allreduce` over TCP is with more threads (`PCCL_THREADS`), beside Gloo.

    python benchmarks/scaling.py                  # 64 MiB, two and four processes, a table
    python benchmarks/scaling.py --threads 1 2 --world 2 --json build/scaling.json
    python benchmarks/scaling.py --quick

All ranks are processes of this host and use loopback (`PCCL_SHM=0`). A float32 array is summed into
memory that was touched before; ranks meet before each timed call, and a call's time is that of rank
0. The number of threads is fixed when a process starts. So a round starts the ranks of every row
once, in turn, and a row has the median of its calls in each round.

plain       as pccl runs on one host, but over TCP
far         as between hosts: 16 connections to each peer, and checksums
encrypted   the same with a secret, which replaces the checksums

The goal of more threads is that a byte costs hardly more CPU time than with one.

gloo / pccl: above 1 pccl is faster. Threads of all ranks together should not exceed the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from report import by_block, factor, goal, machine
from together import run_ranks

import pccl

MIB = 1 << 20
SECRET = "a secret of a benchmark, 32 bytes or more"
CPU_GOAL = 1.05  # times the CPU seconds of one thread
KINDS = {
    "plain": {},
    "far": {"PCCL_STRIPES": "16", "PCCL_CHECKSUM": "always"},
    "encrypted": {"PCCL_STRIPES": "16", "PCCL_SECRET": SECRET},
}


def have_gloo() -> bool:
    try:
        import torch.distributed
    except ImportError:
        return False
    return bool(torch.distributed.is_gloo_available())


def timed(meet: Callable[[], object], call: Callable[[], object], calls: int) -> None:
    """Prints the seconds of each call, and the CPU seconds of all."""
    for _ in range(3):
        call()
    times = []
    cpu = time.process_time()
    for _ in range(calls):
        meet()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    print(json.dumps({"times": times, "cpu": time.process_time() - cpu}), flush=True)


def pccl_rank(args: argparse.Namespace) -> None:
    pccl.init(min_peers=args.world[0])
    array = np.random.default_rng(pccl.rank()).random(args.mib * MIB // 4, np.float32)
    total = np.ones_like(array)
    word = np.zeros(1)
    timed(lambda: pccl.allreduce(word), lambda: pccl.allreduce(array, "sum", out=total), args.calls)
    pccl.shutdown()


def gloo_rank(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    store = dist.FileStore(args.store, args.world[0])
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.world[0])
    array = torch.zeros(args.mib * MIB // 4)  # sums of others would grow
    timed(dist.barrier, lambda: dist.all_reduce(array), args.calls)
    dist.destroy_process_group()


class Row:
    """One configuration, and what its rounds have measured."""

    def __init__(self, world: int, kind: str, threads: int) -> None:
        self.world = world
        self.kind = kind
        self.threads = threads
        self.rounds: list[float] = []  # seconds
        self.cpu: list[float] = []  # of all ranks, for one call

    def run(self, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--world", str(self.world)]
        command += ["--mib", str(args.mib), "--calls", str(args.calls)]
        with (
            pccl.MasterNode(
                "127.0.0.1:0", secret=KINDS.get(self.kind, {}).get("PCCL_SECRET")
            ) as master,
            tempfile.TemporaryDirectory() as folder,
        ):
            env = {**os.environ, "PCCL_MASTER": master.address, "PCCL_SHM": "0"}
            env |= {"PCCL_BIND": "127.0.0.1", "PCCL_THREADS": str(self.threads or 1)}
            env |= KINDS.get(self.kind, {})
            role = ["--peer", self.kind, "--store", f"{folder}/store", "--rank"]
            commands = [[*command, *role, str(rank)] for rank in range(self.world)]
            found = [json.loads(output) for output in run_ranks(commands, env)]
        self.rounds.append(statistics.median(found[0]["times"]))
        self.cpu.append(sum(one["cpu"] for one in found) / args.calls)

    def line(self, gloo: Row | None, mib: int) -> str:
        middle = statistics.median(self.rounds)
        ratio = ""
        if gloo is not None and gloo is not self:
            each = [a / b for a, b in zip(gloo.rounds, self.rounds, strict=True)]
            ratio = f"{statistics.median(each):.2f} ({min(each):.2f} - {max(each):.2f})"
        gigabytes = mib * MIB / 1e9
        return (
            f"| {self.world} | {self.kind} | {self.threads or ''} | {1000 * middle:.1f} "
            f"({1000 * min(self.rounds):.1f} - {1000 * max(self.rounds):.1f}) "
            f"| {gigabytes / middle:.2f} | {statistics.median(self.cpu) / gigabytes:.2f} "
            f"| {ratio} |"
        )


def goals(rows: list[Row], mib: int) -> None:
    """Prints them: CPU time of more threads beside that of one in the same round."""
    ones = {(row.world, row.kind): row for row in rows if row.threads == 1}
    for row in rows:
        one = ones.get((row.world, row.kind))
        if one is None or row.threads < 2:
            continue
        parts = by_block(row.cpu, one.cpu)
        name = f"all-reduce of {mib} MiB, {row.kind}, {row.world} ranks, {row.threads} threads: "
        name += "CPU time, of one thread's"
        goal(name, statistics.median(parts), parts, factor, at_most=CPU_GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--calls", type=int, default=10, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1 MiB, one round, two ranks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return gloo_rank(args) if args.peer == "gloo" else pccl_rank(args)
    if args.quick:
        args.mib, args.rounds, args.calls, args.world, args.threads = 1, 1, 3, [2], [1, 2]
    rows = [
        row
        for world in args.world
        for row in [
            *([Row(world, "gloo", 0)] if have_gloo() else []),
            *(Row(world, kind, threads) for kind in args.kinds for threads in args.threads),
        ]
    ]
    for _ in range(args.rounds):
        for row in rows:
            row.run(args)
    print(f"{machine()}; {args.mib} MiB, {args.rounds} rounds of {args.calls} calls\n")
    print("| ranks | | threads | ms (least - most) | GB/s | CPU s/GB | gloo / pccl |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        gloo = next((one for one in rows if (one.world, one.kind) == (row.world, "gloo")), None)
        print(row.line(gloo, args.mib))
    print()
    goals(rows, args.mib)
    if args.json:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
