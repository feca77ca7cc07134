"""What `pccl.allreduce` of a tree of many small arrays costs for each of them.

    python benchmarks/tree.py [--arrays 1000] [--elements 16] [--blocks 20] [--calls 20] [--json FILE]

Two ranks of this host reduce float32 arrays in memory: with out=, into new arrays, and for
comparison one flat array with as many elements. Every block has trees of names that were not seen
before: its first call is shown by itself. All ways take turns, and a time is that of the slowest
rank, divided by the number of arrays. The goal is for the calls after the first one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from report import Table, announce, by_block, goal, quartiles, ratio, write_results
from together import run_ranks

import pccl

RANKS = 2
GOAL = 0.7  # microseconds an array
WAYS = {"out": "with out=", "new": "new arrays", "flat": "one flat array"}


def slowest(call: Callable[[], object], count: int) -> float:
    """Seconds of a call, of `count`, on the slowest rank."""
    pccl.allreduce(np.zeros(1), "max")
    begin = time.perf_counter()
    for _ in range(count):
        call()
    took = (time.perf_counter() - begin) / count
    return float(pccl.allreduce(np.array([took]), "max")[0])


def make_call(way: str, arrays: int, elements: int, block: int) -> Callable[[], object]:
    """A call with arrays that no call had before."""
    if way == "flat":
        flat = np.ones(arrays * elements, np.float32)
        return partial(pccl.allreduce, flat, out=np.empty_like(flat))
    names = [f"{way} {block}.{number}" for number in range(arrays)]
    tree = {name: np.ones(elements, np.float32) for name in names}
    if way == "new":
        return partial(pccl.allreduce, tree)
    return partial(pccl.allreduce, tree, out={name: np.empty_like(tree[name]) for name in names})


def be_rank(args: argparse.Namespace) -> None:
    """Measures; rank 0 prints microseconds an array, of each block."""
    pccl.init(min_peers=RANKS)
    first: dict[str, list[float]] = {way: [] for way in WAYS}
    later: dict[str, list[float]] = {way: [] for way in WAYS}
    names = list(WAYS)
    for block in range(args.blocks + 1):
        turn = block % len(names)
        for way in names[turn:] + names[:turn]:
            call = make_call(way, args.arrays, args.elements, block)
            for times, count in ((first, 1), (later, args.calls)):
                times[way].append(1e6 * slowest(call, count) / args.arrays)
    if pccl.rank() == 0:
        found = {"first": first, "later": later}  # the first block warms up
        kept = {kind: {way: one[1:] for way, one in found[kind].items()} for kind in found}
        print(json.dumps(kept), flush=True)
    pccl.shutdown()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Starts the ranks; returns what rank 0 measured."""
    with pccl.MasterNode("127.0.0.1:0") as master:
        command = [sys.executable, __file__, "--rank"]
        for name in ("arrays", "elements", "blocks", "calls"):
            command += [f"--{name}", str(getattr(args, name))]
        env = {**os.environ, "PCCL_MASTER": master.address, "PCCL_BIND": "127.0.0.1"}
        outputs = run_ranks([command] * RANKS, env)
    found: dict[str, Any] = json.loads(b"".join(outputs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arrays", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=16, help="of an array")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--calls", type=int, default=20, help="per block, after the first")
    parser.add_argument("--quick", action="store_true", help="two blocks of two calls")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.blocks, args.calls = 2, 2
    if args.rank:
        be_rank(args)
        return
    about = announce()
    found = run(args)
    title = f"A tree of {args.arrays} arrays of {args.elements} float32 elements, {RANKS} ranks"
    columns = ["", "first call: us an array", "later: us an array", "quartiles", "over flat"]
    table = Table(title, columns)
    goals = []
    for way, name in WAYS.items():
        first, later = (found[kind][way] for kind in ("first", "later"))
        low, high = quartiles(later)
        over = statistics.median(by_block(later, found["later"]["flat"]))
        cells = [f"{statistics.median(times):.3f}" for times in (first, later)]
        table.add([name, *cells, f"{low:.3f} - {high:.3f}", ratio(over)])
    print()
    for way in ("out", "new"):
        later = found["later"][way]
        name = f"all-reduce of {args.arrays} arrays, {WAYS[way]}, microseconds an array"
        goals.append(goal(name, statistics.median(later), later, "{:.3g}".format, at_most=GOAL))
    write_results(args.json, about, **found, goals=goals)


if __name__ == "__main__":
    main()
