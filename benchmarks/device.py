"""Compares `pccl.allreduce` of arrays on an accelerator with its parts, in one run.

    python benchmarks/device.py                   # 64 and 256 MiB, two processes, a table
    python benchmarks/device.py --quick --json build/device.json

Entrances take turns, a block of calls each; a block's time is that of its slowest rank. All ranks
use one device and so share its copies.

copy      the tensor from the device to pinned memory, or back: the slower of the two
numpy     `pccl.allreduce` of a NumPy array, in place
bound     the slower of copy and numpy. A call that overlaps them perfectly takes as long

The bound's ratio of a row is the median over blocks; 1 is the best. The goal of calls in pieces
("in place", "new result") is 0.85. Gloo copies through memory of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from report import machine, write_results
from together import in_turns, ratio_quartiles, run_ranks

import pccl
from pccl.reduce import pieces

MIB = 1 << 20
GOAL = 0.85
IN_PIECES = ("in place", "new result")
ROWS = (*IN_PIECES, "later, in place", "jax", "gloo, in place")


def entrances(count: int) -> dict[str, Callable[[], Any]]:
    """A call each, of `count` float32 elements. All of its work is over when it returns."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(count, device="cuda")
    summed = torch.zeros(count, device="cuda")  # sums of ones would grow
    pinned = torch.ones(count, pin_memory=True)
    inside = np.ones(count, np.float32)
    stream = torch.cuda.current_stream()

    def over(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            call()
            stream.synchronize()

        return run

    calls = {
        "out": over(lambda: pinned.copy_(tensor, non_blocking=True)),
        "back": over(lambda: tensor.copy_(pinned, non_blocking=True)),
        "numpy": lambda: pccl.allreduce(inside, "avg", out=inside),
        "in place": over(lambda: pccl.allreduce(tensor, "avg", out=tensor)),
        "new result": over(lambda: pccl.allreduce(tensor, "avg")),
        "later, in place": over(lambda: pccl.allreduce_async(tensor, "avg", out=tensor).wait()),
        "gloo, in place": over(lambda: dist.all_reduce(summed, dist.ReduceOp.SUM)),
    }
    try:
        import jax
        import jax.numpy as jnp

        array = jax.device_put(jnp.ones(count), jax.devices("gpu")[0])
    except (ImportError, RuntimeError):
        return calls
    calls["jax"] = lambda: jax.block_until_ready(pccl.allreduce(array, "avg"))
    return calls


def rank_main(args: argparse.Namespace) -> None:
    import torch.distributed as dist

    if args.piece_mib:
        pieces.PIECE_BYTES = int(args.piece_mib * MIB)
    comm = pccl.init(min_peers=args.world)
    store = dist.FileStore(args.store, args.world)
    dist.init_process_group("gloo", store=store, rank=pccl.rank(comm), world_size=args.world)
    found: dict[str, dict[str, list[float]]] = {}
    for mib in args.mib:
        found[str(mib)] = in_turns(entrances(mib * MIB // 4), args.blocks, args.calls)
    if pccl.rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    pccl.shutdown()


def run(args: argparse.Namespace, shm: str) -> dict[str, dict[str, list[float]]]:
    """Milliseconds a call of each entrance, by block, for each size."""
    command = [sys.executable, __file__, "--peer", "--world", str(args.world)]
    command += ["--blocks", str(args.blocks), "--calls", str(args.calls)]
    command += ["--mib", *map(str, args.mib), "--piece-mib", str(args.piece_mib)]
    with pccl.MasterNode("127.0.0.1:0") as master, tempfile.TemporaryDirectory() as folder:
        command += ["--store", f"{folder}/store"]
        env = {**os.environ, "PCCL_MASTER": master.address, "PCCL_SHM": shm}
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        outputs = run_ranks([command] * args.world, env)
    found: dict[str, dict[str, list[float]]] = json.loads(b"".join(outputs))
    return found


def rows(found: dict[str, list[float]], where: str) -> list[str]:
    """The lines of one size: medians over blocks, and ratios with their quartiles."""
    copy = [max(pair) for pair in zip(found["out"], found["back"], strict=True)]
    bound = [max(pair) for pair in zip(copy, found["numpy"], strict=True)]
    lines = []
    for name, times in [("copy", copy), ("numpy", found["numpy"])]:
        lines.append(f"| {where} | {name} | {statistics.median(times):.1f} | | | |")
    for name in ROWS:
        if name not in found:
            continue
        low, middle, high = ratio_quartiles(bound, found[name])
        goal = f"{GOAL}" if name in IN_PIECES else ""
        lines.append(
            f"| {where} | {name} | {statistics.median(found[name]):.1f} "
            f"| {middle:.2f} | {low:.2f} - {high:.2f} | {goal} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--calls", type=int, default=4, help="per block")
    words = "size of the pieces that are copied, in place of pccl's own (0)"
    parser.add_argument("--piece-mib", type=float, default=0, metavar="N", help=words)
    parser.add_argument("--quick", action="store_true", help="1 MiB, two blocks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.mib, args.blocks, args.calls = [1], 2, 1
    if args.peer:
        return rank_main(args)
    try:
        import torch
    except ImportError:
        sys.exit("torch is missing: pip install 'pccl-collectives[torch]'")
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    about = machine(["torch"]) | {"device": torch.cuda.get_device_name()}
    print(f"{about['device']}, {about['cores']} cores, {about['date']}\n")
    print("| memory | call | ms | of the bound | quartiles | goal |\n|---|---|---|---|---|---|")
    results = {}
    for transport, shm in (("shm", "1"), ("tcp", "0")):
        results[transport] = run(args, shm)
        for mib, found in results[transport].items():
            print("\n".join(rows(found, f"{mib} MiB, {transport}")), flush=True)
    write_results(args.json, about, ms=results)


if __name__ == "__main__":
    main()
