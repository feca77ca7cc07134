"""Measures quantized all-reduce on this host, over TCP: times, bytes and errors of results.

    python benchmarks/quantize.py                # 64 MiB among 2 and 4 peers; errors among 2 and 8
    python benchmarks/quantize.py --quick --json build/quantize.json

Loopback is faster than the codes are made, so this shows their cost; what they save shows on slower
links. All ways take turns, a block of calls each; a block's time is that of its slowest rank.
Errors are those of the mean of a million normally distributed float32 elements of each peer, as
parts of the range of the 512 results around each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from together import in_turns, ratio_quartiles, run_ranks

import pccl

WAYS = (None, "int8", "int4", "float8")
BLOCK = 512


def normals(count: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def times(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds by block, and bytes sent by this rank, of each way."""
    array = normals((args.mib << 20) // 4, pccl.rank())
    out = np.empty_like(array)
    sent: dict[str, int] = {}

    def reduce(way: str | None) -> None:
        _, info = pccl.allreduce(array, "avg", out=out, quantize=way, return_info=True)
        sent[str(way)] = info.tx_bytes

    ms = in_turns({str(way): partial(reduce, way) for way in WAYS}, args.blocks, args.calls)
    return {"world": args.world, "ms": ms, "bytes": sent}


def errors(args: argparse.Namespace) -> dict[str, Any]:
    """The mean and the largest error of each way, as parts of the range around each element."""
    count = args.elements // BLOCK * BLOCK
    exact = np.mean([normals(count, rank) for rank in range(args.world)], axis=0, dtype=np.float64)
    rows = exact.reshape(-1, BLOCK)
    ranges = rows.max(axis=1) - rows.min(axis=1)
    found: dict[str, Any] = {"world": args.world, "errors": {}}
    for way in WAYS[1:]:
        result = pccl.allreduce(normals(count, pccl.rank()), "avg", quantize=way)
        parts = np.abs(result - exact).reshape(-1, BLOCK) / ranges[:, None]
        found["errors"][way] = [float(parts.mean()), float(parts.max())]
    return found


def run(what: str, world: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the measurements of rank 0."""
    with pccl.MasterNode("127.0.0.1:0") as master:
        command = [sys.executable, __file__, "--peer", what, "--world", str(world)]
        for name in ("mib", "blocks", "calls", "elements"):
            command += [f"--{name}", str(getattr(args, name))]
        env = {**os.environ, "PCCL_MASTER": master.address, "PCCL_SHM": "0"}
        outputs = run_ranks([command] * world, env)
    found: dict[str, Any] = json.loads(b"".join(outputs))
    return found


def tables(found: list[dict[str, Any]]) -> str:
    """`float32 / this` is the median of the blocks' ratios: above 1, fewer bits are faster even
    here."""
    lines = ["| peers | on the way | ms | float32 / this | bytes |", "|---|---|---|---|---|"]
    for one in found:
        for way in one.get("ms", ()):
            _, ratio, _ = ratio_quartiles(one["ms"]["None"], one["ms"][way])
            part = one["bytes"][way] / one["bytes"]["None"]
            lines.append(
                f"| {one['world']} | {'float32' if way == 'None' else way} | "
                f"{statistics.median(one['ms'][way]):.1f} | {ratio:.2f} | {part:.1%} |"
            )
    lines += ["", "| peers | on the way | mean error | largest |", "|---|---|---|---|"]
    for one in found:
        for way, (mean, largest) in one.get("errors", {}).items():
            lines.append(f"| {one['world']} | {way} | {mean:.3%} | {largest:.2%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--error-worlds", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--calls", type=int, default=4, help="per block")
    parser.add_argument("--quick", action="store_true", help="1 MiB, two blocks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peer", choices=("times", "errors"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.mib, args.blocks, args.calls, args.elements = 1, 2, 1, 100_000
    if args.peer:
        pccl.init(min_peers=args.world)
        found = times(args) if args.peer == "times" else errors(args)
        if pccl.rank() == 0:
            print(json.dumps(found), flush=True)
        pccl.shutdown()
        return
    measured = [run("times", world, args) for world in args.worlds]
    measured += [run("errors", world, args) for world in args.error_worlds]
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1))
    print(tables(measured))


if __name__ == "__main__":
    main()
