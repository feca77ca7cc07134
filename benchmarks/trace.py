"""Measures the cost of a trace, and of asking for statistics: all entrances take turns.

    python benchmarks/trace.py                   # 64 KiB in shared memory, two processes, a table
    PCCL_SHM=0 python benchmarks/trace.py        # the same over TCP
    python benchmarks/trace.py --quick --json build/trace.json

"plain" and "again" are two communicators without a trace, so their ratio is the noise. "traced" is
one that writes a trace. "asked" is plain, with a `stats()` after every 100 calls. A block's time is
that of its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from together import ratio_quartiles, run_ranks

import pccl

ENTRANCES = ("plain", "again", "traced", "asked")
_ASK_EVERY = 100


def rank_main(args: argparse.Namespace) -> None:
    folder = os.environ.pop("PCCL_TRACE")
    comms: dict[str, pccl.Communicator] = {}
    for group, name in enumerate(ENTRANCES[:3]):
        if name == "traced":
            os.environ["PCCL_TRACE"] = folder
        comms[name] = pccl.init(peer_group=group, min_peers=args.world)
        os.environ.pop("PCCL_TRACE", None)
        pccl.api._default = None  # the next one is made beside it
    comms["asked"] = comms["plain"]
    times: dict[str, list[float]] = {name: [] for name in ENTRANCES}
    array = np.ones(args.kib * 256, np.float32)
    for block in range(args.blocks + 1):  # the first one warms up
        for name in ENTRANCES[block % 4 :] + ENTRANCES[: block % 4]:
            comm = comms[name]
            pccl.allreduce(1.0, "max", comm=comm)
            begin = time.perf_counter()
            for call in range(args.calls):
                pccl.allreduce(array, "avg", out=array, comm=comm)
                if name == "asked" and call % _ASK_EVERY == 0:
                    comm.stats()
            took = (time.perf_counter() - begin) / args.calls
            times[name].append(1e6 * float(pccl.allreduce(took, "max", comm=comm)))
    if comms["plain"].stats().rank == 0:
        print(json.dumps({name: values[1:] for name, values in times.items()}), flush=True)
    for comm in {id(comm): comm for comm in comms.values()}.values():
        comm.close()


def run(args: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds a call of each entrance, by block."""
    with tempfile.TemporaryDirectory() as folder, pccl.MasterNode("127.0.0.1:0") as master:
        command = [sys.executable, __file__, "--peer"]
        for name in ("world", "kib", "blocks", "calls"):
            command += [f"--{name}", str(getattr(args, name))]
        env = {**os.environ, "PCCL_MASTER": master.address, "PCCL_TRACE": folder}
        outputs = run_ranks([command] * args.world, env)
        if len(list(Path(folder).glob("*.json"))) != args.world:
            raise SystemExit("not every rank wrote a trace")
    found: dict[str, list[float]] = json.loads(b"".join(outputs))
    return found


def table(found: dict[str, list[float]]) -> str:
    """Medians over blocks; `of plain` is the median of the blocks' ratios, with its quartiles."""
    lines = ["| entrance | us | of plain | quartiles |", "|---|---|---|---|"]
    for name in ENTRANCES:
        low, middle, high = ratio_quartiles(found[name], found["plain"])
        lines.append(
            f"| {name} | {statistics.median(found[name]):.1f} "
            f"| {middle:.3f} | {low:.3f} - {high:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--kib", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--calls", type=int, default=2000, help="per block")
    parser.add_argument("--quick", action="store_true", help="two blocks of 20 calls")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.blocks, args.calls = 2, 20
    if args.peer:
        rank_main(args)
        return
    found = run(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
